"""checkpoints_qlora/search: what is known about the candidates of a search, and which of them go on."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from safetrain.core.storage import paths
from safetrain.core.storage.files import link_file, read_or_none, write_atomic

WAITING, TRAINING, BEHIND, FINISHED, BEST = "waiting", "training", "behind", "finished", "best"  # states
DROPPED, LEFT_OUT = "dropped", "left out"


@dataclass(frozen=True)
class Candidate:
    """One of a search's runs, trained as far as it was worth. Its folder is like checkpoints_qlora."""

    name: str  # of its folder in checkpoints_qlora/search
    values: tuple[str, ...]  # KEY=VALUE
    state: str = WAITING
    why: str = ""  # why it was dropped or left out
    steps: int = 0  # trained so far
    total_steps: int = 0  # of its whole run
    eval_steps: int = 1
    step_seconds: float = 0.0  # planned, with a share of the validations
    start_seconds: float = 0.0  # planned for each start of its training process
    end_seconds: float = 0.0  # planned for its evaluation and the report
    losses: tuple[tuple[int, float], ...] = ()  # step of each rung, best validation loss so far
    score: float | None = None  # of its answers to validation questions, 0 to 1, if candidates are ranked by it
    behind_by: float | None = None  # the best at its last rung, in nats per label, or score; None: not compared yet
    plus_minus: float | None = None  # 95 % interval of that difference; None: unknown, as of one row

    @property
    def is_on(self) -> bool:
        """Whether it is still in the search."""
        return self.state in (WAITING, TRAINING)

    @property
    def folder(self) -> Path:
        return paths.SEARCH / self.name

    def step_at(self, share: float) -> int:
        """The validation of the whole run that is nearest to a share of it."""
        every, total = self.eval_steps, self.total_steps
        return total if share == 1 else min(total, every * max(1, round(share * total / every)))


@dataclass(frozen=True)
class Search:
    """search.json: a search as far as it is."""

    words: tuple[str, ...]  # as given
    by: str  # loss or score
    minutes: float
    candidates: tuple[Candidate, ...] = ()
    joins_ranks: bool = False  # whether two ranks join after the first rung
    rungs: tuple[float, ...] = ()  # shares of a whole run
    rung: int = 0  # number of rungs passed
    planned_seconds: float = 0.0
    spare_seconds: float = 0.0  # left for candidates that are tied with the best
    spent_seconds: float = 0.0
    steps_for_ties: int = 0  # trained in them
    best: str = ""  # name of the best candidate; empty: not known yet
    is_finished: bool = False  # whether the best is the project's result

    @property
    def remaining(self) -> tuple[Candidate, ...]:
        """The candidates that are still in the search."""
        return tuple(each for each in self.candidates if each.is_on)

    def with_(self, *changed: Candidate) -> "Search":
        """The search with new facts about some candidates."""
        new = {each.name: each for each in changed}
        return replace(self, candidates=tuple(new.get(each.name, each) for each in self.candidates))


def candidates_with(folder: Path | None) -> tuple[Candidate, ...]:
    """The candidates of the search that ``folder`` belongs to; empty if there is none."""
    found = read_or_none(paths.SEARCH / paths.STANDINGS, Search) if folder is not None else None
    return found.candidates if found is not None and found.best else ()


def save_row_losses(folder: Path, step: int, best_step: int, own: tuple[np.ndarray, np.ndarray] | None) -> None:
    """Write what the best adapter so far has on each validation row, for the validation at ``step``.

    ``own``: losses (rows,), summed over the labels of each row or pair in nats, and numbers of labels, (rows,), a pair
    counting as one; None if the best step was an earlier one.
    """
    file = folder / f"{step}_{paths.ROW_LOSSES}"
    if own is None:
        write_atomic(file, partial(link_file, folder / f"{best_step}_{paths.ROW_LOSSES}"))
        return
    both = np.stack([each.astype(np.float64) for each in own])
    write_atomic(file, lambda path: np.save(path, both, allow_pickle=False))


def row_losses_of(candidate: Candidate) -> tuple[np.ndarray, np.ndarray]:
    """What ``save_row_losses`` has written at the candidate's last rung; raises OSError, ValueError."""
    losses, labels = np.load(candidate.folder / f"{candidate.losses[-1][0]}_{paths.ROW_LOSSES}", allow_pickle=False)
    return losses, labels

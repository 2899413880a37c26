"""Ends trainings in every way there is and continues them.

``python -m benchmarks.bench_chaos [--ranks] [--kills 200] [--seed 1]``

With ``--ranks``: one of two ranks. Two tables: kills drawn from a seed over all phases and signals, and other endings
staged one by one. Each time the verdict is compared with what really happened, and what the continued training comes to
with one that nobody killed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.chaos.deaths import deaths
from benchmarks.chaos.drawing import SIGNALS, make_reference, run_chains
from benchmarks.machine import write_result
from tests.support.chaos.ending import Ending, Ground, through_mlx_launch
from tests.support.chaos.inject.chaos_sites import PHASES
from tests.support.chaos.kills import RANKS, Outcome
from tests.support.chaos.project import EVAL_STEPS, SAVE_STEPS, UPDATES, Project, scratch_folder


def main() -> None:
    """Both tables; ends with 1 when anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", action="store_true", help="end one of two ranks")
    parser.add_argument("--kills", type=int, help="at least so many: 200, or 60 of ranks")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    with scratch_folder() as folder:
        project = Project(folder / "main", train={"ranks": RANKS} if asked.ranks else None)
        project.plan()
        reference = make_reference(project)
        say("the training that nobody kills is made, twice alike")
        ground = Ground(project, reference, folder)
        of_ranks = (through_mlx_launch(ground, rank) for rank in range(RANKS))  # started as on several machines
        endings = stage_all(of_ranks if asked.ranks else deaths(ground), say)
        least = asked.kills or (60 if asked.ranks else 200)
        outcomes = run_chains(project, reference, least, asked.seed, say, RANKS if asked.ranks else 1)
    wrong = [f"{o.text}: {'; '.join(o.faults)}" for o in outcomes if o.faults]
    wrong += [f"{e.what}: {'; '.join(e.faults)}" for e in endings if e.faults]
    write_tables(outcomes, endings, wrong, asked.seed, ranks=asked.ranks)
    sys.exit(bool(wrong))


def stage_all(endings: Iterator[Ending], say: Callable[[str], None]) -> list[Ending]:
    """The other endings; when one cannot be staged to its end, that is wrong too."""
    found: list[Ending] = []
    try:
        for ending in endings:
            found.append(ending)
            say(f"{ending.what}: {ending.verdict}; {ending.resumed}; {ending.faults or 'right'}")
    except (RuntimeError, OSError) as error:
        found.append(Ending("the rest", faults=[str(error)]))
    return found


def write_tables(
    outcomes: Sequence[Outcome], endings: list[Ending], wrong: list[str], seed: int, *, ranks: bool
) -> None:
    """benchmarks/results/bench_chaos.md, or bench_chaos_ranks.md."""
    header, rows = table_of(outcomes)
    lines = ["| other ending | verdict | phase | continued | |", "|---|---|---|---|---|"]
    for ending in endings:
        state = "wrong" if ending.faults else "right"
        cells = [ending.what, ending.verdict or "–", ending.phase, ending.resumed, state]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ")[:300] for cell in cells) + " |")
    setting = (
        f"A random 4-bit Llama of two blocks, LoRA, {f'{RANKS} ranks of one machine, ' if ranks else ''}{UPDATES} "
        f"updates, a checkpoint every {SAVE_STEPS}, a validation every {EVAL_STEPS}; killed and continued by the same "
        f"command until it ends. Seed {seed}. "
        "A cell is kills (wrong ones after a stroke); right: exit code, cause, phase and step in postmortem.json, the "
        "step that the next start continues from, and no process left. Bit for bit: the final adapter, all tensors of "
        "the last checkpoint and the metrics without times are those of a training that nobody killed. Most lost: "
        "updates between the kill and what the next start continues from."
    )
    notes = [setting, "\n".join(lines)]
    notes += ["Wrong:\n\n" + "\n".join(f"- {line}" for line in wrong)] if wrong else []
    name, of_whom = ("bench_chaos_ranks", "One of two ranks is") if ranks else ("bench_chaos", "Trainings that are")
    write_result(name, f"{of_whom} killed, and what becomes of it", header, rows, notes)


def table_of(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[object]]]:
    """The kills by phase and signal."""
    header = ["phase", *(number.name for number in SIGNALS), "kills", "verdict right", "bit for bit", "most lost"]
    phases = dict.fromkeys([*PHASES, *(outcome.cell[0] for outcome in outcomes)])
    rows = [row_of(phase, [o for o in outcomes if o.cell[0] == phase]) for phase in phases]
    return header, [*rows, row_of("all", outcomes)]


def row_of(name: str, outcomes: Sequence[Outcome]) -> list[object]:
    """One phase."""
    cells: list[object] = []
    for number in SIGNALS:
        mine = [o for o in outcomes if o.cell[1] == number]
        wrong = sum(bool(o.faults) for o in mine)
        cells.append(f"{len(mine)}/{wrong}" if wrong else len(mine))
    right, exact = sum(not o.faults for o in outcomes), sum(o.resumed_exactly for o in outcomes)
    return [name, *cells, len(outcomes), right, exact, max((o.lost_steps for o in outcomes), default=0)]


if __name__ == "__main__":
    main()

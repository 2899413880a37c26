"""A search over values: candidates stop at rungs, and those that are ahead go on as if nothing had happened.

This is successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943); exact resume continues what others restart.
All that it knows is in checkpoints_qlora/search, so a killed search goes on.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from safetrain.core.errors import InterruptedRun, RunDied, TrainingError
from safetrain.core.events import Event
from safetrain.core.formatting import RUN
from safetrain.core.hosts import hosts_of
from safetrain.core.lock import training_lock
from safetrain.core.postmortem import PostMortem
from safetrain.core.records import search as records
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.run_state import RunState, discard_run
from safetrain.core.records.search import Candidate, Search
from safetrain.core.records.settings import Recommendation, job_of
from safetrain.core.signals import AT_RUNG, Terminated
from safetrain.core.storage import paths
from safetrain.core.storage.files import link_file, read_or_none, read_record, write_atomic, write_record
from safetrain.evaluate.statistics import improvement, score_gain
from safetrain.guard.keep_going import keep_going
from safetrain.guard.process import WatchSettings
from safetrain.plan.child import ChildFailed, run_json
from safetrain.search_plan import (
    SCORE,
    leg_seconds,
    leg_steps,
    plan_of,
    planned_candidate,
    ranks_around,
    seconds_of,
    survivors,
)
from safetrain.stage import composed, to_pipeline

WORKER = (sys.executable, "-m", "safetrain.engine.worker")
JUDGE, JUDGE_SECONDS = "safetrain.evaluate.validation", 3600.0
LATE_SHARE = 0.03  # of the minutes that training may be late
SAVE_SECONDS = 10.0
Show = Callable[[str, Search, Candidate | None], None]  # an event, the search, and the candidate that it is about


class Searching:
    """Runs a planned search, and tells what happens."""

    def __init__(self, search: Search, show: Show) -> None:
        self.search, self._show_event = search, show
        self._began, self._saved = time.monotonic() - search.spent_seconds, 0.0

    def go(self) -> Search:
        """Train to every rung; returns the search with its best candidate.

        Raises TrainingError if no candidate is left, InterruptedRun after a signal or at the end of the minutes.
        """
        self._save("planned")
        timer = threading.Timer(self._seconds_left, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()
        try:
            self._pass_rungs()
        except (InterruptedRun, KeyboardInterrupt) as stop:  # in a training process, and between two
            self._save("stopped")
            number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
            what = "The search stopped; its state is saved."
            if self._seconds_left <= 0:
                what = f"The {self.search.minutes:g} minutes are over; the state of the search is saved."
            code = stop.exit_code - 128 if isinstance(stop, InterruptedRun) else number
            raise InterruptedRun(code, what, do=f"continue with: {os.environ.get(RUN, '')}") from None
        finally:
            timer.cancel()
        return self.search

    def _pass_rungs(self) -> None:
        while self.search.rung < len(self.search.rungs):
            self._train_all()
            if self.search.joins_ranks:
                self._join_ranks()
                self._train_all()
            self._rank(self._count())
            self.search = replace(self.search, rung=self.search.rung + 1)
            self._save("ranked")

    @property
    def _seconds_left(self) -> float:
        """Until training must end, so that the evaluation is not late."""
        most = (1 + LATE_SHARE) * 60 * self.search.minutes
        last = max((each.end_seconds for each in self.search.remaining), default=0.0)
        return most - last - (time.monotonic() - self._began)

    def _save(self, event: str, candidate: Candidate | None = None) -> None:
        search = self.search if candidate is None else self.search.with_(candidate)
        self._saved = time.monotonic()
        self.search = replace(search, spent_seconds=self._saved - self._began)
        write_record(paths.SEARCH / paths.STANDINGS, self.search)
        self._show_event(event, self.search, candidate)

    def _train_all(self) -> None:
        """Bring every candidate to the next rung, unless it is there; raises TrainingError if none is left."""
        for candidate in self.search.remaining:
            step = candidate.step_at(self.search.rungs[self.search.rung])
            if candidate.losses and candidate.losses[-1][0] == step:
                continue
            try:
                if (
                    self.search.by == SCORE
                    and steps_of(candidate) > step
                    and not _scores_file(candidate, step).is_file()
                ):
                    discard_run(candidate.folder)  # the adapter of this step is gone
                if steps_of(candidate) < step:
                    self._train(candidate, step)
                self._save("rung", self._measured(candidate, step))
            except RunDied as error:
                if not (why := _own_fault(candidate, error)):
                    raise
                steps = steps_of(candidate)
                self._save("dropped", replace(candidate, state=records.DROPPED, why=why, steps=steps))
        if not self.search.remaining:
            got = "; ".join(f"{' '.join(each.values)}: {each.why}" for each in self.search.candidates)
            raise TrainingError("No candidate is left.", got=got, do="search over other values")

    def _train(self, candidate: Candidate, step: int) -> None:
        """Train a candidate to a step, by the supervisor of every run."""
        config, folder = to_pipeline(composed(candidate.values)), candidate.folder
        plan = read_record(plan_of(candidate), Recommendation)
        job = job_of(replace(config.train, keep_checkpoints=1), config.lora, plan, hosts_of(1))
        job, hang_seconds = replace(job, folder=str(folder), stop_at_step=step), 60 * config.train.hang_minutes
        self._save("training", replace(candidate, state=records.TRAINING))
        for other in (paths.OUTPUT, *(each.folder for each in self.search.candidates)):  # DPO: once for all
            if (other / paths.REFERENCES).is_file() and not (folder / paths.REFERENCES).exists():
                write_atomic(folder / paths.REFERENCES, partial(link_file, other / paths.REFERENCES))
        try:
            with training_lock(folder) as locks:
                watch = WatchSettings(
                    WORKER, folder / paths.FLIGHT, job.memory_limit_bytes, hang_seconds, locks, serves_starter=False
                )
                keep_going(job, watch, plan, partial(self._show, candidate))
        except InterruptedRun as error:
            if error.exit_code != 128 + AT_RUNG:
                raise

    def _show(self, candidate: Candidate, event: Event) -> None:
        """Hear of a training process."""
        is_due = time.monotonic() - self._saved > SAVE_SECONDS
        if isinstance(event, StepRecord) and (event.valid_loss is not None or is_due):
            self._save("step", replace(candidate, state=records.TRAINING, steps=event.step))

    def _measured(self, candidate: Candidate, step: int) -> Candidate:
        """A candidate at a rung, with its validation loss and, if asked for, its score; it may have stopped early."""
        steps = steps_of(candidate)
        now = replace(candidate, state=records.WAITING, steps=steps, behind_by=None, plus_minus=None)
        now = replace(now, losses=(*candidate.losses, (min(step, steps), 0.0)))
        losses, labels = records.row_losses_of(now)
        now = replace(now, losses=(*now.losses[:-1], (now.losses[-1][0], float(losses.sum() / labels.sum()))))
        return replace(now, score=float(_scores_of(now).mean())) if self.search.by == SCORE else now

    def _count(self) -> int:
        """How many go on from this rung: fewer than planned if this machine is slower than planned."""
        search, following = self.search, self.search.rung + 1
        order = sorted(search.remaining, key=_place)[: survivors(len(search.remaining), search.rungs, search.rung)]
        planned = search.planned_seconds - seconds_of(order, search.rungs, following)
        spent = time.monotonic() - self._began
        slower, left = max(1.0, spent / max(1.0, planned)), 60 * search.minutes - spent
        while len(order) > 1 and slower * seconds_of(order, search.rungs, following) > left:
            order, self.search = order[:-1], replace(search, spare_seconds=0.0)
        return len(order)

    def _join_ranks(self) -> None:
        """Go on with the best learning rate alone, and add candidates with half and twice its adapter's rank."""
        self._rank(1)
        best = self.search.remaining[0]
        ranks = ranks_around(read_record(plan_of(best), Recommendation).settings.lora.rank)
        joining = [planned_candidate((*best.values, f"lora.rank={rank}"))[0] for rank in ranks]
        self.search = replace(self.search, candidates=(*self.search.candidates, *joining), joins_ranks=False)
        self._save("joined")

    def _rank(self, count: int) -> None:
        """Compare the candidates: ``count`` go on, and those tied with the best while planned time is left over."""
        search = self.search
        number, is_last = search.rung, search.rung == len(search.rungs) - 1
        order = sorted(search.remaining, key=_place)
        best, spare, extra, found = order[0], search.spare_seconds, 0, list[Candidate]()
        for place, each in enumerate(order):
            behind, half = _difference(best, each) if place else (0.0, None)
            state = records.WAITING if place < count else records.BEHIND
            if is_last:
                state = records.FINISHED if place else records.BEST
            elif place >= count and (half is None or behind <= half) and not search.joins_ranks:
                to_the_end = number + 2 == len(search.rungs)
                cost = leg_seconds(each, search.rungs, number + 1) + each.end_seconds * to_the_end
                if cost <= spare:
                    state, spare = records.WAITING, spare - cost
                    extra += leg_steps(each, search.rungs, number + 1)
            found.append(replace(each, state=state, behind_by=behind, plus_minus=half))
        self.search = replace(
            search.with_(*found), spare_seconds=spare, steps_for_ties=search.steps_for_ties + extra,
            best=best.name if is_last else "",
        )  # fmt: skip


def steps_of(candidate: Candidate) -> int:
    """Steps that a candidate's newest checkpoint has."""
    state = read_or_none(candidate.folder / paths.POINTER, RunState)
    return state.step if state is not None else 0


def _own_fault(candidate: Candidate, error: RunDied) -> str:
    """Why a candidate died, if its own values are the reason; empty otherwise: the same command goes on."""
    death = read_or_none(candidate.folder / paths.POSTMORTEM, PostMortem)
    if death is not None and death.is_memory:
        return f"out of memory: {death.title}"
    is_number = death is not None and death.cause in ("bad_update", "refused")  # of an update, or of a validation
    return str(error).splitlines()[0] if is_number and error.exit_code == TrainingError.exit_code else ""


def _place(candidate: Candidate) -> float:
    """Smaller is better."""
    return candidate.losses[-1][1] if candidate.score is None else -candidate.score


def _difference(best: Candidate, other: Candidate) -> tuple[float, float | None]:
    """How far a candidate is behind the best at its last rung, row by row, and the 95 % interval of that."""
    if best.score is not None:
        ahead = score_gain(_scores_of(other), _scores_of(best))
        return ahead.mean, (ahead.high - ahead.low) / 2
    (ours, labels), (theirs, _) = map(records.row_losses_of, (best, other))
    gain = improvement(theirs, ours, labels)
    return gain.nats_per_label, gain.plus_minus


def _scores_file(candidate: Candidate, step: int) -> Path:
    return candidate.folder / f"{step}_scores.npy"


def _scores_of(candidate: Candidate) -> np.ndarray:
    """Scores of the answers to the validation questions at the last rung, (questions,); answered once for each rung."""
    file = _scores_file(candidate, candidate.losses[-1][0])
    if not file.is_file():
        try:
            settings = asdict(to_pipeline(composed(candidate.values)).evaluate)
            found = run_json(JUDGE, [str(candidate.folder), json.dumps(settings)], JUDGE_SECONDS)
        except ChildFailed as error:
            what = "The answers of a candidate could not be scored."
            raise TrainingError(what, where=candidate.folder, got=str(error)) from None
        write_atomic(file, lambda path: np.save(path, np.array(found["scores"]), allow_pickle=False))
    return np.asarray(np.load(file, allow_pickle=False))

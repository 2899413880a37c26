"""Plans a search: its candidates with their time and memory, its rungs, and what fits into the minutes."""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from safetrain.core.data.store import open_split
from safetrain.core.data.training_rows import load_training_rows
from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.formatting import print_text
from safetrain.core.hosts import hosts_of
from safetrain.core.model.files import read_model_files
from safetrain.core.records import search as records
from safetrain.core.records.reports import DataReport, Machine, require_data_of
from safetrain.core.records.run_state import RunState, searched
from safetrain.core.records.schema import WHOLE
from safetrain.core.records.search import Candidate, Search
from safetrain.core.records.settings import Recommendation, TrainJob, job_of
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_or_none, read_record, read_result, require_room, write_record
from safetrain.engine.job import load_job
from safetrain.plan.candidates import LOAD_BYTES_PER_SECOND, START_SECONDS, PlanInputs
from safetrain.plan.recommend import plan_run
from safetrain.runs import name_after
from safetrain.stage import composed, to_pipeline

SCORE = "score"  # ranked by scores of answers instead of losses
RATE = "train.learning_rate"
RATES = (1 / 3, 1.0, 3.0)  # times the recommended learning rate, where no values are given
STAGES_SECONDS = 20.0  # to start the stages after training
VALIDATED = 1.1  # time of a step with its share of the validations, in steps
TIES_SHARE = 0.8  # of the minutes may be planned, with ties: planned seconds are not exact
DRY_RUN = "safetrain.engine.dry_run"


def planned_search(
    words: Sequence[str], jobs: Sequence[Sequence[str]], minutes: float, by: str, began_seconds: float
) -> Search:
    """Plan every candidate, the rungs and the time; the record of an unfinished search with the same values goes on.

    ``began_seconds``: of the command, on the monotonic clock. Raises ConfigError if the candidates' losses cannot be
    compared, or the minutes do not suffice for two.
    """
    unfinished = read_or_none(paths.OUTPUT / paths.POINTER, RunState)
    if unfinished is not None and not unfinished.finished and searched(unfinished.identity) is None:
        do = "continue it with the command that started it, or remove it: safetrain discard"
        raise ConfigError("An unfinished run is in the way of this search.", got=f"step {unfinished.step}", do=do)
    before = read_or_none(paths.SEARCH / paths.STANDINGS, Search)
    is_same = before is not None and (before.words, before.by, before.is_finished) == (tuple(words), by, False)
    if before is not None and is_same and before.best:  # all that is left is its run
        return replace(before, minutes=minutes)
    configs = [to_pipeline(composed(job)) for job in jobs]
    if any((config.data, config.model) != (configs[0].data, configs[0].model) for config in configs):
        raise ConfigError("A search cannot vary the data or the model.", do="search over keys of train and lora")
    if by == SCORE and not len(open_split("valid", Path(configs[0].model.path)).question_rows):
        raise ConfigError("The validation rows have no questions.", do="rank by the loss: --by loss")
    jobs, joins_ranks = (jobs, False) if len(jobs) > 1 else _usual(list(jobs[0]))
    candidates = _comparable_candidates(jobs)
    names = [each.name for each in candidates]
    spent_seconds = time.monotonic() - began_seconds
    if before is not None and is_same:
        if names == [each.name for each in before.candidates][: len(names)]:
            return replace(before, minutes=minutes, spent_seconds=before.spent_seconds + spent_seconds)
        print_text("The data, or a value in params.yaml, has changed: this is a new search.")
    search = Search(tuple(words), by, minutes, tuple(candidates), joins_ranks, spent_seconds=spent_seconds)
    search = within_the_minutes(search)
    sizes = [read_record(plan_of(each), Recommendation).disk_bytes for each in search.remaining]
    do = f"free some space, or search over fewer values; 'safetrain discard' removes what is in {paths.SEARCH}"
    require_room(paths.OUTPUT, sum(sizes), "There is too little disk space for this search.", do)
    return search


def _comparable_candidates(jobs: Sequence[Sequence[str]]) -> list[Candidate]:
    shared, candidates = dict[object, str](), list[Candidate]()
    for values in jobs:
        candidate, facts = planned_candidate(tuple(values))
        candidates.append(candidate)
        if candidate.is_on:
            shared.setdefault(facts, " ".join(values))
    if len(shared) > 1:
        expected = "the same train.method, train.beta, max_seq_length, train.eval_steps and validation rows"
        got, do = " and ".join(list(shared.values())[:2]), "search over other keys"
        what = "The validation losses of these candidates cannot be compared."
        raise ConfigError(what, expected=expected, got=got, do=do)
    runs = [each.name.rpartition("-")[2] for each in candidates if each.is_on]
    if len(set(runs)) < len(runs):
        got = "; ".join(" ".join(each.values) for each in candidates if runs.count(each.name.rpartition("-")[2]) > 1)
        raise ConfigError("Two candidates are the same run.", got=got, do="name different values")
    return candidates


def _usual(values: list[str]) -> tuple[list[list[str]], bool]:
    """The candidates around these values, and whether ranks join them: learning rates, or ranks if the rate is set."""
    given, plan = {word.partition("=")[0] for word in values}, _plan(values)[0].settings
    has_rank = "lora.rank" not in given and plan.method not in WHOLE
    if RATE not in given:
        rate = to_pipeline(composed(values)).train.learning_rate or plan.learning_rate
        return [[*values, f"{RATE}={rate * factor:.3g}"] for factor in RATES], has_rank
    if has_rank:
        return [[*values, f"lora.rank={rank}"] for rank in (plan.lora.rank, *ranks_around(plan.lora.rank))], False
    raise ConfigError("There is nothing to search over.", do=f"name several values, e.g. {RATE}=1e-4,1e-3")


def ranks_around(rank: int) -> list[int]:
    return sorted({max(1, rank // 2), 2 * rank} - {rank})


def _plan(values: Sequence[str]) -> tuple[Recommendation, TrainJob]:
    """The plan of a candidate, as the stage recommend_config makes it, and its job."""
    config = to_pipeline(composed(values))
    if config.train.ranks > 1:
        raise ConfigError("A search trains in one process.", got=f"train.ranks={config.train.ranks}", do="set it to 1")
    train, model = replace(config.train, keep_checkpoints=1), read_model_files(Path(config.model.path))
    data, machine = read_result(paths.DATA_REPORT, DataReport), read_result(paths.MACHINE, Machine)
    require_data_of(data, config.data.path)
    inputs = PlanInputs(data, machine, model, load_training_rows(model.folder, train.max_examples))
    plan = plan_run(inputs, train, config.lora, DRY_RUN, print_text)
    return plan, job_of(train, config.lora, plan, hosts_of(1))


def planned_candidate(values: tuple[str, ...]) -> tuple[Candidate, object]:
    """A candidate, its plan written into its folder, and the facts that it must share with the others."""

    def named(identity: object) -> str:
        return f"{name_after(values)}-{hashlib.blake2b(repr(identity).encode(), digest_size=4).hexdigest()}"

    try:
        plan, asked = _plan(values)
    except MachineError as error:
        needed = error.got.partition(" (")[0] or error.what
        return Candidate(named(values), values, records.LEFT_OUT, f"does not fit: {needed}; {error.expected}"), None
    if plan.total_seconds is None or plan.measured is None:
        what, do = "The time of a step could not be measured.", "see why its dry run failed: safetrain run"
        raise ConfigError(what, where=" ".join(values), do=do)
    job = load_job(asked)
    settings, mean_seconds = job.settings, plan.total_seconds / job.updates
    step_seconds = min(VALIDATED * plan.measured.update_seconds, mean_seconds)
    candidate = Candidate(
        named(job.identity), values, total_steps=job.updates, eval_steps=settings.eval_steps, step_seconds=step_seconds,
        start_seconds=START_SECONDS + job.files.static_bytes / LOAD_BYTES_PER_SECOND,
        end_seconds=STAGES_SECONDS + (mean_seconds - step_seconds) * job.updates,
    )  # fmt: skip
    write_record(plan_of(candidate), plan)
    length, every = (settings.max_seq_length, settings.valid_tokens), to_pipeline(composed(values)).train.eval_steps
    return candidate, (settings.method, settings.beta, length, every, job.identity.validation_rows, job.base)


def plan_of(candidate: Candidate) -> Path:
    return candidate.folder / paths.RECOMMENDED_CONFIG.name


def within_the_minutes(search: Search) -> Search:
    """Choose the rungs, and leave out the last candidates if there is too little time for all."""
    on, most = search.remaining, 60 * search.minutes - search.spent_seconds
    for count in range(len(on), 1, -1):
        halvings = 2 if search.joins_ranks else math.ceil(math.log2(count))
        shares = tuple(0.5**number for number in range(halvings, -1, -1))
        for rungs in (shares, (shares[0], 1.0)):
            seconds = seconds_of(on[:count], rungs, joining=2 * search.joins_ranks)
            if seconds <= most:
                out = [replace(each, state=records.LEFT_OUT, why="too few minutes") for each in on[count:]]
                spare = max(0.0, TIES_SHARE * most - seconds)
                return replace(search.with_(*out), rungs=rungs, planned_seconds=seconds, spare_seconds=spare)
    if len(on) < 2:
        got = "; ".join(f"{' '.join(each.values)}: {each.why or 'fits'}" for each in search.candidates)
        raise ConfigError("A search needs two candidates that fit.", got=got)
    needed = math.ceil((seconds + search.spent_seconds) / 60)
    what, do = "There are too few minutes for two candidates.", f"--minutes {needed}, or shorter runs by train.minutes"
    raise ConfigError(what, expected=f"about {needed}", got=f"{search.minutes:g}", do=do)


def seconds_of(candidates: Sequence[Candidate], rungs: Sequence[float], first: int = 0, joining: int = 0) -> float:
    """Planned time from the rung ``first`` on if the slowest candidates are ahead; ``joining`` ones join after it."""
    slowest = sorted(candidates, key=lambda each: -each.step_seconds * each.total_steps)
    total, count = max(each.end_seconds for each in slowest), len(slowest)
    total += joining * leg_seconds(slowest[0], rungs, 0)
    for number in range(first, len(rungs)):
        total += sum(leg_seconds(each, rungs, number) for each in slowest[:count])
        count = survivors(count, rungs, number)
    return total


def leg_seconds(candidate: Candidate, rungs: Sequence[float], number: int) -> float:
    """Planned time of training to a rung from the one before."""
    steps = leg_steps(candidate, rungs, number)
    return steps * candidate.step_seconds + candidate.start_seconds if steps else 0.0


def leg_steps(candidate: Candidate, rungs: Sequence[float], number: int) -> int:
    """Steps to a rung from the one before."""
    return candidate.step_at(rungs[number]) - (candidate.step_at(rungs[number - 1]) if number else 0)


def survivors(count: int, rungs: Sequence[float], number: int) -> int:
    """How many go on from a rung: half, but one to the end."""
    return 1 if number >= len(rungs) - 2 else math.ceil(count / 2)

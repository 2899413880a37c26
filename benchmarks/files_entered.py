# ruff: noqa: E402
"""The files that a row, an update, a recommendation and a death pass through, and how each is entered.

    python -m benchmarks.files_entered [row]

With `row` only the way of a row is printed: through a validation of the example, then through the files that are handed
rows in one update, until its gradient. Noted while they run, on CPU. An update goes from one question whether to stop
to the next, without a record, validation or checkpoint; a training has all of them. A death goes from the end of a
killed process to the verdict that is printed, with the memory ladder at its end. The way of train.learning_rate goes
from the command line to the optimizer, through the files that take the number, alone or as they make a record of it.
"""

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from types import FrameType

from safetrain.engine.cpu.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

from benchmarks.bench_recorder import EMBEDDED, rows
from benchmarks.machine import write_result
from safetrain.core.data.token_rows import TokenRow, TokenRows
from safetrain.core.errors import RunDied
from safetrain.core.events import Event
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.recorder import Recorder
from safetrain.core.records.schema import Pipeline
from safetrain.core.records.settings import Recommendation, TrainJob
from safetrain.core.storage.paths import FLIGHT, RECOMMENDED_CONFIG
from safetrain.data.validate import validate
from safetrain.engine.batches import MicroBatch, Shard, Update
from safetrain.guard.keep_going import PlannedUpdate
from stages.recommend_config import main as recommend_config
from tests.stores import worst_update
from tests.support.chaos.project import TRAIN, Project
from tests.support.jobs import job_of
from tests.support.settings import SETTINGS

KILLED = """
import os, sys
from pathlib import Path
from safetrain.core.events import Begun, EventPipe
from safetrain.core.recorder import Edge, Phase, Recorder, Work
flight, pipe = Path(sys.argv[1]), EventPipe(int(sys.argv[2]))
pipe.send(Begun(15, 0, "training"))
recorder = Recorder(flight / "recorder.bin")
recorder.predicted_peak_bytes = 2**30
recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(3, 0, 4, 160))
print("std::bad_alloc", file=sys.stderr, flush=True)
os.abort()
"""
PLACE = re.compile(r".*/(safetrain/(?:(?:core|data|engine|guard|plan|watch)/.+|stage)\.py)$")
RATE = 1.23456e-4  # a number that nothing else has
Doors = defaultdict[str, set[str]]  # names of functions, by file
HANDED = (TokenRow, TokenRows, Update, MicroBatch, Shard)  # rows, from the store to the gradient


def main() -> None:
    """Trace each and write the table."""
    ways = {"a validation": validation(), "its rows in an update": train(whole=False, handed=HANDED)}
    before, after = ways.values()
    more = len(after.keys() - before.keys())
    row = f"{len(before) + more} files: {len(before)} in a validation, {more} more in an update"
    print(f"a row of JSONL until its gradient: {row}")
    if sys.argv[1:] == ["row"]:
        for way, doors in ways.items():
            print(f"{way}: {', '.join(sorted(doors))}")
        return
    ways |= {"a recommendation": recommend()}
    ways |= {"an update": train(whole=False), "a training": train(whole=True), "a death": die()}
    ways |= {"train.learning_rate": key()}
    table = list[list[object]]([[f"**a row of JSONL until its gradient: {row}**", "", ""]])
    for way, doors in ways.items():
        rooms = Counter(file.split("/")[1] for file in doors)
        table.append([f"**{way}: {len(doors)}**", "", ", ".join(f"{room} {count}" for room, count in rooms.items())])
        table += [[file, len(names), ", ".join(sorted(names))] for file, names in sorted(doors.items())]
    title = "Files of an update, a recommendation and a death"
    write_result("files_entered", title, ["file", "entered by", ""], table)


def watch(doors: Doors, handed: tuple[type, ...] = ()) -> None:
    """From now on note which function of a file another file calls.

    With types ``handed``, only calls that hand over such a value or give it back.
    """

    def note(frame: FrameType, event: str, value: object) -> None:
        file = place_of(frame)
        is_told = event == "call" or (handed and event == "return")
        if not is_told or not file or frame.f_code.co_name.startswith("<"):
            return
        values = frame.f_locals.values() if event == "call" else [value]
        if handed and not any(isinstance(each, handed) for each in values):
            return
        above = [each for each, _ in walk_stack(frame.f_back)]
        caller = next(filter(None, map(place_of, above)), "")  # mlx and mlx-lm call back
        if caller != file:
            doors[file].add(frame.f_code.co_qualname)
        doors[caller or file] |= set()

    sys.setprofile(note)


def validation() -> Doors:
    """Of the rows of the example until they are in the token store."""
    doors = Doors(set)
    with tempfile.TemporaryDirectory() as scratch:
        watch(doors)
        validate([Path("data/example")], EMBEDDED, into=Path(scratch) / "validated")
    sys.setprofile(None)
    return doors


def place_of(frame: FrameType) -> str:
    """The file of a function of the project; empty for all others."""
    found = PLACE.match(frame.f_code.co_filename)
    return found[1] if found else ""


def train(*, whole: bool, handed: tuple[type, ...] = ()) -> Doors:
    """Of a training that validates and saves after each update, or of the third update of one that does not."""
    from safetrain.core.records.run_state import RunIdentity
    from safetrain.engine import run, training

    doors, every = Doors(set), 1 if whole else 100
    of_one: list[Callable[[], object]] = [int, int, doors.clear, lambda: sys.setprofile(None)]
    then = iter([] if whole else of_one)  # at each question

    def stop() -> int:
        next(then, int)()
        return 0

    settings = dataclasses.replace(SETTINGS, max_steps=6, log_steps=every, eval_steps=every, save_steps=every)
    with tempfile.TemporaryDirectory() as scratch:
        folder, identity = Path(scratch), RunIdentity("base", "train", "valid", "{}")
        job = job_of(folder, EMBEDDED, rows(60, 1), rows(8, 2), settings, identity)
        watcher = run.Watcher(lambda *_: None, lambda _: None, stop, Recorder(folder / "recorder.bin"))
        watch(doors, handed=handed)
        training.train(job, watcher)
    sys.setprofile(None)
    return doors


def die() -> Doors:
    """Of a training process that the kernel kills for memory, where nothing is left to try."""
    from safetrain.guard import keep_going, supervisor
    from safetrain.guard.process import WatchSettings

    doors, watched = Doors(set), supervisor._Watch.drain
    settings = dataclasses.replace(SETTINGS, batch_size=1, gradient_checkpointing=True, dequantize_base=False)
    job = TrainJob(str(EMBEDDED), settings, True, MemoryBudget(2**33), None)

    def drain(self: supervisor._Watch, show: Callable[[Event], None]) -> None:
        watch(doors)
        watched(self, show)

    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch)
        settings_of_watch = WatchSettings((sys.executable, "-c", KILLED), output / FLIGHT, None, 60.0, ())
        planned = PlannedUpdate("cpu", worst_update(40, 8))
        supervisor._Watch.drain = drain  # type: ignore[method-assign]
        try:
            keep_going.keep_going(job, settings_of_watch, planned, lambda _event: None)
        except RunDied as error:
            print(error)
        finally:
            sys.setprofile(None)
            supervisor._Watch.drain = watched  # type: ignore[method-assign]
    return doors


def recommend() -> Doors:
    """Of the stage, with nothing pinned."""
    doors = Doors(set)
    with tempfile.TemporaryDirectory() as scratch:
        project = Project(Path(scratch), train=dict.fromkeys(TRAIN))
        for stage in ("validate_data", "preflight"):
            project.succeed(sys.executable, "-m", f"stages.{stage}")
        os.environ.update(project.environment)
        watch(doors)
        with contextlib.chdir(project.folder), contextlib.suppress(SystemExit):
            recommend_config()  # which says what is wrong
    sys.setprofile(None)
    return doors


def key() -> Doors:
    """Of train.learning_rate, which the stage composes, the supervisor writes into the job, and the engine reads."""
    from safetrain.core.records.settings import job_of as resolved
    from safetrain.core.storage.files import read_record, write_record
    from safetrain.engine import run, training
    from safetrain.engine.job import load_job
    from safetrain.stage import _compose_and_call

    doors = Doors(set)

    def note(frame: FrameType, event: str, value: object) -> None:
        values = frame.f_locals.values() if event == "call" else [value] if event == "return" else []
        if not any(isinstance(each, float) and each == RATE for each in values):
            return
        file = next(filter(None, map(place_of, (each for each, _ in walk_stack(frame)))), "")
        doors[file or "outside"].add(frame.f_code.co_qualname)

    def through(config: Pipeline) -> None:
        path = Path("job.json")
        plan = read_record(RECOMMENDED_CONFIG, Recommendation)
        write_record(path, resolved(config.model.path, config.train, config.lora, plan))
        watcher = run.Watcher(lambda *_: None, lambda _: None, int, Recorder(Path("recorder.bin")))
        training.train(load_job(read_record(path, TrainJob)), watcher)

    with tempfile.TemporaryDirectory() as scratch:
        project = Project(Path(scratch), train={"max_steps": 2, "warmup_steps": 0})
        for stage in ("validate_data", "preflight", "recommend_config"):
            project.succeed(sys.executable, "-m", f"stages.{stage}")
        os.environ.update(project.environment)
        with contextlib.chdir(project.folder):
            sys.argv = ["train", f"train.learning_rate={RATE}"]
            sys.setprofile(note)
            _compose_and_call(through)
    sys.setprofile(None)
    return doors


if __name__ == "__main__":
    main()

"""Runs stages of safetrain as often as it is asked: ``python -m tests.support.faults.server``, a JSON object a line.

One process for many runs, because starting one takes longer than what these runs compute. Every run goes through the
stage's own command, with its folder, its overrides and its exit code; the training process of ``stages.train`` is this
process too, so that what goes through the model can be watched. So is that of a dry run.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetrain.core.events import Begun, Event, EventPipe, Failed, Finished, parse_event
from safetrain.core.records.job import TrainJob
from safetrain.core.signals import stop_on_signal
from safetrain.core.storage.files import read_record
from safetrain.core.storage.run_files import JOB, RECORDER
from safetrain.engine.job import load_job
from safetrain.guard import keep_going
from safetrain.guard.process import Ending, WatchSettings
from safetrain.guard.sampling import RecentMemory, limit_now
from safetrain.plan import dry_run as planned
from tests.support.faults.limits import files_of_at_most

Calls = list[tuple[int, int, bool]]  # rows, tokens, and whether the call is a compilation's


def main() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def answer(folder: str, stage: str, overrides: list[str], file_limit: int | None) -> dict[str, Any]:
    """Run one stage in ``folder``; ``file_limit`` bounds every file that it writes, as a full disk would."""
    os.chdir(folder)
    sys.argv = [stage, *overrides]
    module = importlib.import_module(f"stages.{stage}")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), recorded_calls() as calls:
        before = block_call()
        try:
            here = patch.object(keep_going, "supervise", train_here), patch.object(planned, "run_lines", dry_run_here)
            with files_of_at_most(file_limit), here[0], here[1]:
                module.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except Exception:  # noqa: BLE001  a stage that ends with a traceback is a result here
            traceback.print_exc()
            code = 1
        changed = block_call() is not before
    return {
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "calls": calls,
        "class_is_changed": changed,
    }


def train_here(_command: Sequence[str], guarding: WatchSettings, show: Callable[[Event], None]) -> Ending:
    """The training process without the process: its events, and how it ended."""
    from safetrain.engine import worker

    job, began = read_record(guarding.flight / JOB, TrainJob), (time.time(), time.monotonic())
    with tempfile.TemporaryFile() as said, stop_on_signal() as stop:
        code = worker.run_job(job, guarding.flight / RECORDER, EventPipe(said.fileno()), stop)
        said.seek(0)
        events = [event for line in said if (event := parse_event(line)) is not None]
    for event in events:
        show(event)
    return Ending(
        pid=os.getpid(),
        return_code=code,
        began=any(isinstance(event, Begun) for event in events),
        finished=next((event for event in events if isinstance(event, Finished)), None),
        failed=next((event for event in events if isinstance(event, Failed)), None),
        stderr_tail="",
        ended_by_us="",
        overdue_seconds=0.0,
        signal_passed_on=0,
        oom_kills=0,
        limit=limit_now(None),
        last=None,
        recent=RecentMemory(),
        started_seconds=began[0],
        started_monotonic_seconds=began[1],
    )


def dry_run_here(_module: str, arguments: list[str], *_: object) -> tuple[list[str], str]:
    """The dry run without its process: its answer, and that it ended well."""
    from safetrain.engine.dry_run import dry_run

    job, scratch = arguments
    return [json.dumps(dataclasses.asdict(dry_run(load_job(read_record(Path(job), TrainJob)), Path(scratch))))], ""


def block_call() -> object:
    """The method that every Llama block runs, as its class has it now."""
    from mlx_lm.models.llama import TransformerBlock

    return TransformerBlock.__call__


@contextlib.contextmanager
def recorded_calls() -> Iterator[Calls]:
    """What goes through a Llama in training mode, in order; a compiled step runs the model's code once a graph."""
    from mlx_lm.models.llama import LlamaModel

    original, calls = LlamaModel.__call__, []

    def recording(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            calls.append((*inputs.shape, not has_values(inputs)))
        return original(self, inputs, *args, **kwargs)

    LlamaModel.__call__ = recording
    try:
        yield calls
    finally:
        LlamaModel.__call__ = original


def has_values(array: Any) -> bool:
    """Whether an array can be computed now, which it cannot while a function is compiled."""
    import mlx.core as mx

    try:
        mx.eval(array)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()

"""Out of memory: a limit that the training process sets itself, and a memory group in which the kernel kills."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.deaths import MOST_DIFFERENCE
from safetrain.core.recorder import Edge, FlightRecord, Phase, read_flight
from tests.support.chaos.ending import Ending, Ground
from tests.support.chaos.project import NO_LEARNING, Adapter, Done, Project, chat, difference_of_movement, left_over

GIB = 2**30
GROUPS = Path("/sys/fs/cgroup")
LARGE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
SETTINGS: dict[str, Any] = {"batch_size": 16, "gradient_accumulation": 1, "max_steps": 4, "max_seq_length": 512}
SHARES = (0.65, 0.6, 0.55, 0.5)  # of the private memory of a training without a limit


@dataclass(frozen=True)
class Free:
    """What a training without a limit took, and came to."""

    project: Project
    adapter: Adapter
    initial: Adapter
    data_bytes: int  # private writable memory at its most, which RLIMIT_DATA counts
    resident_limit_bytes: int


def memory(ground: Ground) -> Iterator[Ending]:
    """All of them."""
    if sys.platform != "linux":
        yield Ending("memory limits", skipped="RLIMIT_DATA and memory groups are Linux's")
        return
    free = free_run(ground)
    yield own_limit(free)
    try:
        with memory_group(free.resident_limit_bytes) as group:
            yield kernel_kill(free, group)
    except OSError as error:
        yield Ending("a memory group that is too small", skipped=f"no memory group can be made here ({error})")


def free_run(ground: Ground) -> Free:
    """A model and rows whose activations matter, trained without a limit."""
    rows = [chat(f"What is {n}?", f"{n} and {n + 1} " * (80 + n % 5)) for n in range(32)]
    project = Project(ground.folder / "memory", rows=rows, model=LARGE, train=SETTINGS)
    project.plan()
    initial = project.adapter_after(f"train.learning_rate={NO_LEARNING}", "train.max_steps=1")
    adapter = project.adapter_after()
    flight = read_flight(project.flight / "recorder.bin")
    if flight.last is None:
        raise RuntimeError("the training has left no recorder")
    data = max(record.data_bytes for record in flight.records)
    resident = between([(record, record.footprint_bytes) for record in flight.records])
    return Free(project, adapter, initial, data, resident)


def between(values: list[tuple[FlightRecord, int]]) -> int:
    """Half way from what is there before the first gradient to the most there ever is."""
    first = next(value for record, value in values if (record.phase, record.edge) == (Phase.GRADIENT, Edge.BEFORE))
    return (first + max(value for _, value in values)) // 2


def own_limit(free: Free) -> Ending:
    """train.memory_limit_gb is too small for the configuration: a smaller micro-batch is found by itself.

    A process reserves more than it needs, so the limit is lowered until the configuration does not fit any more.
    """
    project = free.project
    for share in SHARES:
        limit = share * free.data_bytes / GIB
        (project.output / "postmortem.json").unlink(missing_ok=True)
        done = project.train(f"train.memory_limit_gb={limit:.4f}", anew=True)
        if done.code or project.json("training_summary.json").get("memory_rungs"):
            break
    ending = Ending(f"train.memory_limit_gb={limit:.2f}, too little for 16 rows at a time")
    _expect_death(ending, project.json("postmortem.json"), is_memory=True)
    _went_on(free, ending, done)
    return ending


def kernel_kill(free: Free, group: Path) -> Ending:
    """In a group that is too small, the kernel kills the process and the rest goes on there; or it begins smaller."""
    limit = free.resident_limit_bytes / GIB
    ending = Ending(f"a memory group of {limit:.3f} GiB, too little for 16 rows at a time")
    project = free.project
    (project.output / "postmortem.json").unlink(missing_ok=True)
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    project.discard()
    done = project.finish(project.start("sh", "-c", enter, "sh", sys.executable, "-m", "stages.train"))
    told = project.json("postmortem.json")
    _expect_death(ending, told, cause="oom_kill", confidence="confirmed", is_memory=True, exit_code=137)
    _went_on(free, ending, done)
    left_over(project.folder)
    return ending


def _expect_death(ending: Ending, told: dict[str, Any], **expected: object) -> None:
    """Compare the post-mortem, unless the limit was seen before the process began."""
    if told:
        ending.expect(told, **expected)
    else:
        ending.verdict = "nobody dies: it begins with fewer rows"


def _went_on(free: Free, ending: Ending, done: Done) -> None:
    summary = free.project.json("training_summary.json")
    ending.require(done.code == 0, f"ended with {done.code}: {done.last_line}")
    if done.code:
        return
    ending.require(bool(summary.get("memory_rungs")), "everything fitted")
    part = difference_of_movement(free.project.adapter(), free.adapter, free.initial)
    shape = f"{summary.get('batch_size')} x {summary.get('gradient_accumulation')} rows"
    recomputed = ", blocks recomputed" if summary.get("gradient_checkpointing") else ""
    ending.resumed = f"by itself with {shape}{recomputed}; weights differ by {part:.1e} of their movement"
    ending.require(part <= MOST_DIFFERENCE, ending.resumed)


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A new memory group; raises OSError where this process may not make one."""
    old = GROUPS / "memory"
    group = (old if old.is_dir() else GROUPS) / f"safetrain-chaos-{os.getpid()}"
    group.mkdir()
    try:
        if old.is_dir():
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
            (group / "memory.swappiness").write_text("0")
        else:
            (group / "memory.max").write_text(str(limit_bytes))
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        deadline = time.monotonic() + 10
        while group.is_dir() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # a process of it is still ending
                group.rmdir()
            time.sleep(0.1)

"""Run one of the project's own modules, such as a dry run, in a child process that may die, and cache its answer.

A cached answer becomes invalid if the measuring code, a package or Python changes. The memory budget of each backend
limits a child as it limits a training process.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.formatting import duration_text, size_text
from safetrain.core.memory.system import GIB, PROCESS_BYTES, Readings, footprint_bytes, host_room_bytes, read_memory
from safetrain.core.memory.terms import usable_cores
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine
from safetrain.core.records.settings import MEMORY, DryRun, TrainJob
from safetrain.core.signals import handling
from safetrain.core.storage import paths
from safetrain.core.storage.files import cache_directory, from_json, keep_text, read_or_none, write_record

TRACEBACK = "Traceback (most recent call last)"
WATCH_SECONDS = 0.1  # between two readings of a child's memory
GRACE_SECONDS = 3.0  # to exit after SIGTERM: SIGKILL at once may leave GPU memory wired (omlx#2184)
PASSED_CAP = "its memory exceeded"
KILLED = "killed by signal"
OUT_OF_MEMORY = ("memory", "allocate", "resource temporarily unavailable")
# On CPU a failed allocation crashes mlx or prevents a thread from starting; SIGKILL comes from the OOM killer.
MEMORY_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGKILL)
# Files of core that decide the memory of a step, or what a model computes.
CORE_CODE = ("memory/terms.py", "data/training_rows.py", "records/settings.py")
PACKAGES = ("mlx", "mlx-lm", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "scipy-openblas32")
NOT_INSTALLED = "not installed"  # instead of a version
MOST_SECONDS = 3600.0  # time limit of a dry run
CAP_SLACK = 1.15
# Shares of the working set that Metal recommends, for machines up to 16 GiB and larger ones: an M5 Pro of 24 GB starved
# at 0.93, an 8 GB M1 trained at 0.9 (published: tests/core/readings.py).
METAL_SHARE, LARGE_METAL_SHARE = 0.9, 0.85
# Memory left to macOS, in addition to wired memory: macOS compresses and swaps the rest on demand.
METAL_RESERVE_BYTES, METAL_RESERVE_SHARE = 3 * GIB // 2, 0.1  # the share applies above 16 GiB
LARGE_MACHINE_BYTES = 16 * GIB
TYPICAL_WIRED_BYTES, LARGE_WIRED_BYTES = 8 * GIB // 5, 3 * GIB  # if no reading is available; the second above 8 GiB
# A CUDA context takes 0.13 to 0.75 GiB; cuBLAS workspaces and fragmentation take the rest (published: readings.py).
CUDA_SHARE, CUDA_RESERVE_BYTES = 0.92, GIB // 2


class ChildFailed(Exception):
    """The child failed, or its answer cannot be read; the message gives the reason."""


def room_bytes(own_limit_bytes: int | None = None) -> int | None:
    """Memory limit for a child on macOS, where process limits do not cover Metal's memory.

    None on other systems: the child limits itself (engine/backend.py: ``keep_to_room``).
    """
    if sys.platform != "darwin":
        return None
    host = read_memory()
    most = metal_budget_bytes(host.total_bytes, host.total_bytes, host.wired_bytes)
    return most if own_limit_bytes is None else min(most, own_limit_bytes)


def run_json(
    module: str, arguments: list[str], timeout_seconds: float, most_bytes: int | None = None
) -> dict[str, Any]:
    """Run ``python -m module arguments`` and read its last line of output as JSON; raises ChildFailed."""
    lines, ended = run_lines(module, arguments, timeout_seconds, most_bytes)
    if ended:
        raise ChildFailed(ended)
    try:
        return json.loads([line for line in lines if line.strip()][-1])
    except (ValueError, IndexError):
        raise ChildFailed("the child process gave no readable answer") from None


def run_lines(
    module: str, arguments: list[str], timeout_seconds: float, most_bytes: int | None = None
) -> tuple[list[str], str]:
    """Run ``python -m module arguments``; return the lines it printed and how it failed (empty on success).

    The child is stopped if it uses more memory than ``most_bytes``. The failure's text names the file with a traceback.
    """
    command = [sys.executable, "-m", module, *arguments]
    open_output = functools.partial(tempfile.TemporaryFile, "w+", encoding="utf-8", errors="replace")
    with open_output() as out, open_output() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        try:
            how = _wait(process, timeout_seconds, most_bytes)
        finally:  # also when we are interrupted
            if process.poll() is None:
                process.kill()
                process.wait()
        out.seek(0)
        err.seek(0)
        lines, errors = out.read().splitlines(), err.read()
    if not how:
        return lines, ""
    # the last line that is not indented: an error's first line, without its place or remedy
    last = next((line for line in reversed(errors.splitlines()) if line and not line[0].isspace()), "")
    file = keep_text(errors) if TRACEBACK in errors else ""
    last += f" (traceback: {file})" if file else ""
    return lines, f"{how}: {last}" if last else how


def ran_out_of_memory(ended: str) -> bool:
    """Whether a child that ended this way ran out of memory, as far as is known."""
    if ended.startswith(KILLED):
        return any(ended.startswith(f"{KILLED} {number:d}") for number in MEMORY_SIGNALS)
    return any(word in ended.lower() for word in OUT_OF_MEMORY)


def _wait(process: "subprocess.Popen[bytes]", timeout_seconds: float, most_bytes: int | None) -> str:
    """Wait for the child; return how it failed or why it must be stopped, empty on success."""
    deadline = time.monotonic() + timeout_seconds
    while (remaining := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(remaining if most_bytes is None else min(remaining, WATCH_SECONDS))
            return "" if code == 0 else f"{KILLED} {-code}" if code < 0 else f"exit code {code}"
        if most_bytes is not None and footprint_bytes(process.pid) > most_bytes:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # run_lines kills it
                process.wait(GRACE_SECONDS)
            return f"{PASSED_CAP} {size_text(most_bytes)}"
    return f"not finished after {timeout_seconds:.0f} s"


def run_to_its_end(command: list[str], stdout: int | None = None) -> int:
    """Run a command in this terminal and return its exit code, or 128 plus the number of the signal that killed it.

    The terminal sends Ctrl-C to the child too, and this process waits until the child has saved its state:
    ``subprocess.run`` would kill it after a quarter of a second. SIGTERM reaches only this process, which forwards it.
    """
    process = subprocess.Popen(command, stdout=stdout)
    with handling({signal.SIGINT: lambda _number: None, signal.SIGTERM: process.send_signal}):
        code = process.wait()
    return code if code >= 0 else 128 - code


@functools.cache
def installation() -> str:
    """Hash of this Python, its packages, and the source that decides the memory of a step and the engine's answers."""
    package = Path(__file__).parent.parent
    files = [*(package / "engine").rglob("*.py"), *(package / "core" / name for name in CORE_CODE)]
    code = (file.read_text(encoding="utf-8") for file in sorted(files))
    return digest_of(sys.executable, *(f"{name} {version_of(name)}" for name in PACKAGES), *code)


def digest_of(*words: str) -> str:
    """A short hash of all ``words``, in order."""
    return hashlib.blake2b("\n".join(words).encode(), digest_size=12).hexdigest()


def answers_about(kind: str, *words: str) -> Path:
    """Path of a cached answer of this kind; ``words`` and the installation determine it."""
    return cache_directory() / kind / digest_of(installation(), *words)


def keep_answer(path: Path, answer: object) -> None:
    """Write a dataclass to the cache; if that is not possible, the next run measures again."""
    with contextlib.suppress(OSError):
        write_record(path, answer)


def version_of(package: str) -> str:
    """The version of a package, or NOT_INSTALLED."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


@dataclass(frozen=True)
class Answer:
    """A dry run's measurements, or the reason why they are missing."""

    measured: DryRun | None
    ended: str  # how the process failed; empty if it did not
    ran_out_of_memory: bool  # as far as that is known


def dry_run_path(model: ModelFiles, machine: Machine, job: TrainJob, rows: str) -> Path:
    """Path of a dry run's cached answer for this machine and all settings that affect the measurement.

    ``rows`` is a hash of the rows. Learning rate and intervals do not affect the path.
    """
    keys = *MEMORY, "num_epochs", "max_steps", "max_examples", "seed"
    settings = [getattr(job.settings, key) for key in keys]
    here = f"{machine.chip} {machine.physical_cores} {machine.backend} {machine.device} {usable_cores()}"
    key = digest_of(f"{rows} {settings} {(job.memory_budget, job.memory_limit_bytes, job.mlx_limit_bytes)}")
    return answers_about("dry_runs", model.fingerprint, here) / f"{key}.json"


def try_out(path: Path, module: str, job: TrainJob, seconds: float, say: Callable[[str], None]) -> Answer | None:
    """Run the largest updates of the job under its limits, with ``python -m module``; the answer is cached at ``path``.

    ``seconds``: the expected time, which is printed first. Without a module, only a cached answer is returned.
    """
    cached = read_or_none(path, Answer)
    if cached is not None or not module:
        return cached
    about = f", about {duration_text(seconds)}" if seconds else ""
    say(f"dry run of the largest updates{about}: {job.settings}")
    parent = paths.OUTPUT if paths.OUTPUT.is_dir() else None
    # if this process is killed, the next training run removes it: paths.HALF_WRITTEN
    with tempfile.TemporaryDirectory(prefix=".dry-run-", suffix=".partial", dir=parent) as scratch:
        file = Path(scratch) / "job.json"
        write_record(file, job)
        most = most_bytes(job.memory_budget.total_bytes, job.memory_limit_bytes)
        lines, ended = run_lines(module, [str(file), scratch], MOST_SECONDS, most)
    try:
        answer = Answer(from_json(DryRun, json.loads(lines[-1])), "", False)
    except (IndexError, ValueError, TypeError):
        answer = Answer(None, ended or "it gave no answer", ran_out_of_memory(ended))
    if answer.measured is not None:
        say(f"dry run: {answer.measured.update_seconds:.2f} s per step, peak {size_text(answer.measured.peak_bytes)}")
    # If the kernel killed the process, or it has no limit of its own, other programs may have used the memory.
    limited, by_kernel = job.memory_limit_bytes is not None, ended.startswith(f"{KILLED} {signal.SIGKILL:d}")
    own_fault = ended.startswith(PASSED_CAP) or (answer.ran_out_of_memory and limited and not by_kernel)
    if answer.measured is not None or own_fault:
        keep_answer(path, answer)
    return answer


def most_bytes(budget_bytes: int, own_limit_bytes: int | None, platform: str = sys.platform) -> int | None:
    """Memory limit of a dry run on macOS; None on other systems, where it limits itself.

    Without train.memory_limit_gb, the limit is a little above the budget: mlx keeps unused buffers up to its own limit.
    """
    return own_limit_bytes or int(CAP_SLACK * budget_bytes) or None if platform == "darwin" else None


# The memory that a training process may use


def metal_budget_bytes(
    working_set_bytes: int, total_bytes: int, wired_bytes: int = 0, process_bytes: int = PROCESS_BYTES
) -> int:
    """Memory budget on Metal: a share of the working set plus ``process_bytes``, limited by what wired memory leaves.

    The working set bounds Metal's buffers only, not Python's memory. psutil's ``available`` (inactive and free pages)
    is not used: macOS keeps it small on purpose, 0.5 to 2.7 GiB on Macs of 8 GB on which a 7B model was trained
    (MakazhanAlpamys/Soup #663, giampaolo/psutil #1503).
    """
    large = total_bytes > LARGE_MACHINE_BYTES
    share = LARGE_METAL_SHARE if large else METAL_SHARE
    reserve = int(METAL_RESERVE_SHARE * total_bytes) if large else METAL_RESERVE_BYTES
    typical = TYPICAL_WIRED_BYTES if total_bytes <= LARGE_MACHINE_BYTES // 2 else LARGE_WIRED_BYTES
    working = int(share * working_set_bytes) + process_bytes
    return max(0, min(working, total_bytes - (wired_bytes or typical) - reserve))


def cuda_budget_bytes(free_bytes: int) -> int:
    """Memory budget on CUDA: a share of the device's free memory, minus the CUDA context."""
    return max(0, int(CUDA_SHARE * (free_bytes - CUDA_RESERVE_BYTES)))


def budget_bytes(backend: str, device_bytes: int, host: Readings, process_bytes: int = PROCESS_BYTES) -> int:
    """Memory that a training process may use on this machine now.

    ``device_bytes``: the working set that Metal recommends, or the free memory of a CUDA device; 0 on a CPU.
    """
    if backend == "cuda":
        return cuda_budget_bytes(device_bytes)
    if backend == "metal":
        return metal_budget_bytes(device_bytes, host.total_bytes, host.wired_bytes, process_bytes)
    return host_room_bytes(host)

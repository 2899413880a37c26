"""`safetrain selftest --report`: one screen about this machine, to paste into an issue, without names and paths."""

import dataclasses
import itertools
import os
import platform
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.budget import read_memory
from safetrain.core.memory.cgroup import memory_groups, memory_limit_bytes
from safetrain.core.storage.files import FULL_FLUSH, make_durable
from safetrain.plan.child import ChildFailed, room_cap, run_json, run_lines
from safetrain.plan.machine import Probe, chip_name, read_machine_now, version_of

PACKAGES = ("mlx", "mlx-lm", "safetrain")
SECTIONS = ("product", "attention", "update")
SECTION_SECONDS = 120.0
COLUMNS, LABEL = 80, 11
FENCE = "```"  # so that a forge keeps the columns


def read_system() -> dict[str, Any]:
    """What the system says of itself, as JSON; without mlx."""
    is_macos = sys.platform == "darwin"
    return {
        "system": f"macOS {platform.mac_ver()[0]}" if is_macos else f"{platform.system()} {platform.release()}",
        "chip": chip_name(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "versions": [f"Python {platform.python_version()}", *(f"{name} {version_of(name)}" for name in PACKAGES)],
        **dataclasses.asdict(read_memory()),
        "swap_used_bytes": psutil.swap_memory().used,
        "container_limit_bytes": memory_limit_bytes(memory_groups()),
    }


def report_lines(probe: str, engine: str) -> Iterator[str]:
    """The block, line by line as it is measured: ``python -m probe`` for the device, ``python -m engine SECTION``."""
    yield FENCE
    yield f"safetrain selftest --report, {time.strftime('%Y-%m-%d')}"
    last = ""
    for label, text in _figures(probe, engine):
        start = f"{label if label != last else '':<{LABEL}}"
        yield from textwrap.wrap(start + text, COLUMNS, subsequent_indent=" " * LABEL)
        last = label
    yield FENCE


def _figures(probe: str, engine: str) -> Iterator[tuple[str, str]]:
    """Labels and texts. A section whose child dies says so; its lines without a label are a library's."""
    system = read_system()
    yield (
        "system",
        f"{system['system']}, {system['architecture']}, {system['chip']}, {counted(system['cores'], 'core')}",
    )
    yield "versions", ", ".join(system["versions"])
    yield "memory", _memory(system)
    try:
        yield "device", _device(Probe(**run_json(probe, [], SECTION_SECONDS, room_cap())))
    except ChildFailed as error:
        yield "device", f"FAILED: {without_names(str(error))}"
    for section in SECTIONS:
        lines, ended = run_lines(engine, [section], SECTION_SECONDS, room_cap())
        yield from ((section, line.partition("\t")[2]) for line in lines if line.startswith(f"{section}\t"))
        if ended:
            yield section, f"FAILED: {without_names(ended)}"
    try:
        yield "files", _flush_times()
    except OSError as error:
        yield "files", f"FAILED: {error.strerror}"


def _memory(system: dict[str, Any]) -> str:
    keys = ("total", "available", "wired", "swap_used", "container_limit")
    sizes = {key.replace("_", " "): system[f"{key}_bytes"] for key in keys}
    text = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size)
    pressure, free = system["pressure_level"], system["free_percent"]
    return f"{text}, pressure level {pressure}, {free} % free" if pressure else text


def _device(probe: Probe) -> str:
    """The device, and the limits that preflight takes from it."""
    machine = read_machine_now(probe)
    sizes = {
        "working set": probe.working_set_bytes,
        "free on the GPU": probe.device_free_bytes,
        "a training may use": machine.memory_budget_bytes,
        "process without a model": machine.process_memory_bytes,
    }
    limits = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size)
    dtype = f", bfloat16 emulated: {machine.compute_dtype}" if machine.compute_dtype else ""
    return f"{machine.backend}, {machine.device or probe.blas}{dtype}; {limits}"


def _flush_times() -> str:
    """Time to make a megabyte durable in this folder."""
    times = list[str]()
    with tempfile.TemporaryFile(dir=Path.cwd()) as file:
        for name, full_flush in {"fsync": None, "F_FULLFSYNC": FULL_FLUSH}.items():
            file.write(os.urandom(2**20))
            file.flush()
            began = time.perf_counter()
            make_durable(file.fileno(), full_flush)
            if name == "fsync" or full_flush is not None:
                times.append(f"{name} {1000 * (time.perf_counter() - began):.1f} ms")
    return f"1 MiB: {', '.join(times)}"


def without_names(ended: str) -> str:
    """How a child ended, cut off before the first part that may name a path, the user or the host."""
    names = [name for name in ("/", "~", Path.home().name, platform.node().partition(".")[0]) if name]
    parts = ended.partition(" (traceback: ")[0].split(": ")
    public = list(itertools.takewhile(lambda part: not any(name in part for name in names), parts))
    return ": ".join(public if public == parts else [*public, "(left out, it may name a path)"])

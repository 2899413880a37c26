"""Asks the engine, in a child process, about the device and whether it can open and train a model."""

import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

from safetrain.core.memory.macos import sysctl_number
from safetrain.core.memory.terms import backend_of, base_bytes, usable_cores
from safetrain.core.model.files import ModelFiles
from safetrain.plan.child import (
    ChildFailed,
    answers_about,
    keep_answer,
    ran_out_of_memory,
    read_answer,
    room_cap,
    run_json,
)
from safetrain.plan.machine import Probe, chip_name, read_machine_now

TIMEOUT_SECONDS = 600


def ask_engine(module: str, model: ModelFiles | None, level: str, own_limit: int | None) -> tuple[Probe | None, str]:
    """The answer of ``python -m module``; None and the reason where mlx does not work.

    Whether the model loads and trains is asked once for this model and installation. A model larger than the memory
    that is left is not loaded: the checks say so, and the machine does not swap.
    """
    path = answer_path(model.fingerprint) if model else None
    known = remembered(path) if path else None
    if known is not None and known.backend != "cuda":
        return known, ""
    try:
        probe = Probe(**run_json(module, [], TIMEOUT_SECONDS))
    except ChildFailed as error:
        return None, str(error)
    if known is not None:  # free GPU memory is asked every time
        return replace(probe, loads=known.loads, load_seconds=known.load_seconds, trains=known.trains), ""
    if model is None or path is None or level == "quick":
        return probe, ""
    opened_bytes = base_bytes(model, backend_of(model, probe.backend, dequantize_base=False))
    if opened_bytes >= read_machine_now(probe).memory_budget.mlx_bytes:
        return probe, ""
    try:
        asked = [str(model.folder), *([] if own_limit is None else [str(own_limit)])]
        probe = Probe(**run_json(module, asked, TIMEOUT_SECONDS, room_cap(own_limit)))
    except ChildFailed as error:
        return (probe if ran_out_of_memory(str(error)) else replace(probe, loads=False, load_error=str(error))), ""
    keep_answer(path, probe)
    return probe, ""


def answer_path(model_fingerprint: str) -> Path:
    """Where the answer for this model on this machine is kept."""
    words = (model_fingerprint, chip_name(), str(usable_cores()), *_graphics())
    return answers_about("probes", *words).with_suffix(".json")


def _graphics() -> list[str]:
    """What decides whether mlx finds a GPU, and how much of its memory it may have: macOS 26 allows more than 15."""
    if sys.platform == "darwin":
        return [str(sysctl_number("iogpu.wired_limit_mb")), platform.release()]
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return [*devices, os.environ.get("CUDA_VISIBLE_DEVICES", "all")]


def remembered(path: Path) -> Probe | None:
    """The earlier answer, if there is one by which the model loads and trains."""
    probe = read_answer(path, Probe)
    return probe if probe and probe.loads and probe.trains else None

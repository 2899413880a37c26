"""A zip for a bug report: numbers of a run, and words from fixed lists. No free text, so there is nothing to redact."""

import json
import platform
import re
import shutil
import zipfile
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from safetrain.core.errors import ConfigError
from safetrain.core.memory.system import memory_groups, memory_limit_bytes
from safetrain.core.recorder import Phase
from safetrain.core.records.schema import CHOICES, Train
from safetrain.core.run_folder import Run
from safetrain.core.storage.files import require_new, write_atomic

MOST_STEPS, LAST_STEPS, LAST_RECORDS, LAST_EVENTS = 500, 200, 400, 200
PACKAGES = (
    "safetrain", "mlx", "mlx-lm", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "transformers", "tokenizers",
    "numpy", "dvc", "hydra-core", "omegaconf", "huggingface-hub", "jinja2", "matplotlib", "psutil", "rich", "typer",
    "scipy-openblas32", "pyarrow", "gguf", "peft", "torch", "wandb", "mlflow-skinny", "tensorboard",
)  # fmt: skip
CAUSES = (  # names of causes in a post-mortem
    "allocation_failed", "bad_update", "crash", "disk_full", "engine_error", "gpu_timeout", "gpu_victim",
    "gpu_watchdog", "hang", "killed", "memory_limit", "oom_kill", "orphaned", "out_of_memory", "panic",
    "python_error", "ranks_apart", "reboot", "refused", "resource_limit", "ssh", "stopped", "supervisor_killed",
    "unknown",
)  # fmt: skip
VERSION, BACKEND, DTYPE = r"\d+(\.\w{1,8}){0,4}", "cpu|metal|cuda", "float32|float16|bfloat16"
CHIP = r"(Apple|Intel|AMD|ARM|Ampere|NVIDIA|Tesla|GeForce|Quadro)\b[\w ()@.+-]{0,50}"
WORDS = {  # by field: the texts that may leave the machine
    **{key.name: "|".join(map(str, key.metadata[CHOICES])) for key in fields(Train) if CHOICES in key.metadata},
    "targets": r"all-linear|(self_attn\.|mlp\.)?(q|k|v|o|gate|up|down)_proj",
    "compute_dtype": DTYPE, "quantized_compute_dtype": DTYPE, "basis": "closed form|dry run",
    "cause": "|".join(CAUSES), "confidence": "confirmed|likely|unsure",
    "phase": f"(after )?({'|'.join(phase.label for phase in Phase)})",
    "id": "[A-Z][A-Z0-9-]{2,39}", "severity": "error|warning|note",
    "system": f"(Linux|Darwin|macOS)( {VERSION})?", "architecture": "x86_64|aarch64|arm64",
    "chip": CHIP, "device": CHIP, "backend": BACKEND, "planned_backend": BACKEND,
    "python": VERSION, "mlx": VERSION, "mlx_lm": VERSION,
}  # fmt: skip
ALLOWED = {name: re.compile(pattern) for name, pattern in WORDS.items()}


def write_bundle(out: Path, run: Run) -> list[str]:
    """Write the zip; return a line about each file. Raises ConfigError if ``out`` exists or has another suffix."""
    if out.suffix != ".zip":
        raise ConfigError("The bundle is a zip file.", where=str(out), do=f"name it {out.with_suffix('.zip').name}")
    require_new(out, do="choose another name, or remove it")
    files = {"machine.json": _machine(), "run.json": _run(run)}
    texts = {name: json.dumps(value, indent=1) for name, value in files.items()}

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file:
            for name, text in texts.items():
                file.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)

    write_atomic(out, write)
    return [f"{len(text) / 1024:>7.1f} KiB  {name}" for name, text in texts.items()]


def _run(run: Run) -> dict[str, Any]:
    """Return the run's records as numbers; of a long run, only some of its steps."""
    stride, last = max(1, len(run.steps) // MOST_STEPS), len(run.steps) - LAST_STEPS
    steps = tuple(step for place, step in enumerate(run.steps) if place % stride == 0 or place >= last)
    journal = run.journal[-LAST_EVENTS:]
    numbers: dict[str, Any] = _numbers(replace(run, steps=steps, flight=run.flight[-LAST_RECORDS:], journal=journal))
    events = [type(entry.event).__name__ for entry in journal]
    return numbers | {"events": events, "unreadable": [Path(name).name for name, _ in run.unreadable]}


def _numbers(value: Any, name: str = "") -> Any:
    """Keep a record's numbers, and the texts that WORDS allows for their field; leave out everything else."""
    if is_dataclass(value):
        parts = {field.name: _numbers(getattr(value, field.name), field.name) for field in fields(value)}
        return {name: part for name, part in parts.items() if part is not None}
    if isinstance(value, tuple):
        return [part for each in value if (part := _numbers(each, name)) is not None] or None
    if isinstance(value, str):
        return value if name in ALLOWED and ALLOWED[name].fullmatch(value) else None
    return value.name if isinstance(value, Enum) else value if isinstance(value, bool | int | float) else None


def _machine() -> dict[str, Any]:
    memory, swap, packages = psutil.virtual_memory(), psutil.swap_memory(), dict[str, str]()
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = _number(version(name))
    return {
        "system": platform.system(), "release": _number(platform.mac_ver()[0] or platform.release()),
        "architecture": platform.machine(), "python": platform.python_version(), "packages": packages,
        "cores": psutil.cpu_count(logical=False), "memory_bytes": memory.total, "available_bytes": memory.available,
        "swap_bytes": swap.total, "used_swap_bytes": swap.used, "free_disk_bytes": shutil.disk_usage(".").free,
        "container_limit_bytes": memory_limit_bytes(memory_groups()),
    }  # fmt: skip


def _number(text: str) -> str:
    """Return the number that a version begins with; empty if there is none."""
    found = re.match(VERSION, text)
    return found[0] if found else ""

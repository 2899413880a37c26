"""A zip for a bug report: numbers of a run, and words from fixed lists. No free text, so there is nothing to redact."""

import json
import platform
import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
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

PROCESSES = ("is_locked", "worker_lives", "worker_is_stopped", "worker_footprint_bytes")
MOST_STEPS, LAST_STEPS, LAST_RECORDS, LAST_EVENTS = 2000, 200, 400, 200
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
WORDS = {  # field: its texts that may leave the machine
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
    items = list(_items(run))

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file:
            for name, _, text in items:
                file.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)

    write_atomic(out, write, over=False)
    return [f"{len(text) / 1024:>7.1f} KiB  {name:<24} {about}" for name, about, text in items]


def _items(run: Run) -> Iterator[tuple[str, str, str]]:
    """Name, content in words, and text of each file."""
    yield "machine.json", "this machine now: memory, disk, versions of packages", _json(_machine())
    status = {name: _numbers(getattr(run, name)) for name in ("state", "checkpoint", "marker")}
    status |= {"processes": {name: getattr(run, name) for name in PROCESSES}}
    status |= {"unreadable": [Path(name).name for name, _ in run.unreadable]}
    yield "status.json", "whether training is running, and how far it is", _json(status)
    events = [
        {**_numbers(entry), **_numbers(entry.event), "event": type(entry.event).__name__}
        for entry in run.journal[-LAST_EVENTS:]
    ]
    records = (
        ("planned_machine.json", "the machine that the plan was made for", run.machine),
        ("data_report.json", "counts and lengths of rows, findings by id", run.data),
        ("recommended_config.json", "recommended values and predicted memory", run.plan),
        ("job.json", "settings of the newest training process", run.job),
        ("training_summary.json", "settings and results of the finished training", run.summary),
        ("evaluation.json", "scores of the base and tuned models", run.evaluation),
        ("postmortem.json", "cause, phase and memory of the last death", run.postmortem),
    )
    for name, about, record in records:
        if record is not None:
            yield name, about, _json(_numbers(record))
    if events:
        yield "journal.json", "times of the last events", _json(events)
    if run.steps:
        stride, first = max(1, len(run.steps) // MOST_STEPS), len(run.steps) - LAST_STEPS
        steps = [asdict(step) for place, step in enumerate(run.steps) if place % stride == 0 or place >= first]
        yield "training_metrics.csv", "losses, speed and memory; only part of a long run", _csv(steps)
    if run.flight:
        rows = [
            {**_numbers(record.work), **_numbers(record), "phase": record.phase_label}
            for record in run.flight[-LAST_RECORDS:]
        ]
        for row in rows:
            del row["work"]
        yield "flight.csv", "the last phases of the training process", _csv(rows)


def _numbers(value: Any, name: str = "") -> Any:
    """A record's numbers, and texts that are in WORDS for their field; everything else is left out."""
    if is_dataclass(value):
        parts = {field.name: _numbers(getattr(value, field.name), field.name) for field in fields(value)}
        return {name: part for name, part in parts.items() if part is not None}
    if isinstance(value, tuple):
        return [part for each in value if (part := _numbers(each, name)) is not None] or None
    if isinstance(value, str):
        return value if name in ALLOWED and ALLOWED[name].fullmatch(value) else None
    return value if isinstance(value, bool | int | float) else None


def _machine() -> dict[str, Any]:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    release = re.match(VERSION, platform.mac_ver()[0] or platform.release())
    packages = dict[str, str]()
    for name in PACKAGES:
        try:
            number = re.match(VERSION, version(name))
        except PackageNotFoundError:
            continue
        packages[name] = number[0] if number else ""
    return {
        "system": platform.system(), "release": release[0] if release else "", "architecture": platform.machine(),
        "python": platform.python_version(), "cores": psutil.cpu_count(logical=False), "memory_bytes": memory.total,
        "available_bytes": memory.available, "swap_bytes": swap.total, "used_swap_bytes": swap.used,
        "container_limit_bytes": memory_limit_bytes(memory_groups()), "free_disk_bytes": shutil.disk_usage(".").free,
        "packages": packages,
    }  # fmt: skip


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))  # unknown values are left out of a row
    lines = [
        columns,
        *(["" if row.get(name) is None else str(row[name]) for name in columns] for row in rows),
    ]  # no text has a comma
    return "".join(f"{','.join(line)}\n" for line in lines)


def _json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"

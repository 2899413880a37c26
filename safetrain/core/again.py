"""The command that runs the pipeline again, for remedies."""

import os
from pathlib import Path

RUN = "SAFETRAIN_RUN"  # environment variable: `safetrain run` and its overrides, as the user typed them
DVC = "dvc repro"
STAGES = ("validate_data", "preflight", "recommend_config", "train", "evaluate", "plot")


def run_again() -> str:
    """The command that started this run, else the usual one."""
    return os.environ.get(RUN) or DVC


def ran_by(lock: Path = Path("dvc.lock")) -> str:
    """The like for a run that has ended: DVC keeps a lock of what it ran."""
    return os.environ.get(RUN) or (DVC if lock.is_file() else "safetrain run")


def stage_module(name: str) -> str:
    """The Python module of a stage: this folder's own in the program's repository, else the installed one."""
    return f"stages.{name}" if Path(f"stages/{name}.py").is_file() else f"safetrain.stages.{name}"

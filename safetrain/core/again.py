"""The command that runs the pipeline again, for remedies."""

import os
from pathlib import Path

RUN = "SAFETRAIN_RUN"  # environment variable: `safetrain run` and its overrides, as the user typed them
DVC = "dvc repro"


def run_again() -> str:
    """The command that started this run, else the usual one."""
    return os.environ.get(RUN) or DVC


def ran_by(lock: Path = Path("dvc.lock")) -> str:
    """The like for a run that has ended: DVC keeps a lock of what it ran."""
    return os.environ.get(RUN) or (DVC if lock.is_file() else "safetrain run")

"""The command that runs the pipeline again, for remedies."""

import os
from pathlib import Path

RUN = "SAFETRAIN_RUN"  # environment variable: `safetrain run` and its overrides, as the user typed them


def dvc() -> str:
    """What starts DVC: in a project of `safetrain init` it need not be installed by itself."""
    return "safetrain" if Path(".safetrain").is_dir() else "dvc"


def run_again() -> str:
    """The command that started this run, else the usual one."""
    return os.environ.get(RUN) or f"{dvc()} repro"


def ran_by(lock: Path = Path("dvc.lock")) -> str:
    """The like for a run that has ended: DVC keeps a lock of what it ran."""
    return os.environ.get(RUN) or (f"{dvc()} repro" if lock.is_file() else "safetrain run")

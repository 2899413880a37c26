"""The command that runs the pipeline once more, for what is said to do next."""

import os
from pathlib import Path

RUN = "SAFETRAIN_RUN"  # in the environment: what somebody typed, `safetrain run` and its overrides
DVC = "dvc repro"


def run_again() -> str:
    """What somebody typed, else the usual command."""
    return os.environ.get(RUN) or DVC


def ran_by(lock: Path = Path("dvc.lock")) -> str:
    """The like for a run that has ended: DVC keeps a lock of what it ran."""
    return os.environ.get(RUN) or (DVC if lock.is_file() else "safetrain run")

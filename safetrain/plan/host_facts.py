"""What ranks on different machines must have alike. ``python -m safetrain.plan.host_facts MODEL`` prints a machine's.

One line of JSON; preflight runs it at the other end of an ssh, in the folder that has the project there.
"""

import dataclasses
import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.store import open_store, store_path
from safetrain.core.errors import SafetrainError
from safetrain.core.model.files import read_model_files
from safetrain.core.storage import paths
from safetrain.plan.machine import version_of

SPLITS = ("train", "valid")
NONE_THERE = "none"


@dataclass(frozen=True)
class HostFacts:
    """Of one machine; digests, and ``none`` where there is nothing to be read."""

    python: str
    safetrain: str
    mlx: str
    mlx_lm: str
    numpy: str
    data: str  # of data/validated, as train reads it
    model: str  # of the base model's files: config.json, headers, samples of the weights
    seconds: float  # since 1970, by its clock


def facts_here(model: Path) -> HostFacts:
    """Of this machine, in this folder."""
    return HostFacts(
        python=platform.python_version(),
        safetrain=version_of("safetrain"),
        mlx=version_of("mlx"),
        mlx_lm=version_of("mlx-lm"),
        numpy=version_of("numpy"),
        data=_data(),
        model=_model(model),
        seconds=time.time(),
    )


def _data() -> str:
    try:
        return " ".join(open_store(store_path(paths.VALIDATED, split)).digest for split in SPLITS)
    except (OSError, SafetrainError):
        return NONE_THERE


def _model(folder: Path) -> str:
    try:
        return read_model_files(folder).fingerprint
    except (OSError, SafetrainError):
        return NONE_THERE


def main() -> None:
    """One line."""
    print(json.dumps(dataclasses.asdict(facts_here(Path(sys.argv[1])))))


if __name__ == "__main__":
    main()

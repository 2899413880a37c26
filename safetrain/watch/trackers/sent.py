"""What a tracker has of a run already, in checkpoints_qlora/trackers: called again, an export goes on there."""

from dataclasses import dataclass
from pathlib import Path

from safetrain.core.records.record_files import read_record
from safetrain.core.storage import paths

FOLDER = paths.OUTPUT / "trackers"


@dataclass(frozen=True)
class Target:
    """Where a run is sent. Empty: the tracker's own usual place, which is on this machine."""

    tracker: str
    place: str = ""  # a project of W&B, an address of MLflow, a folder of TensorBoard
    name: str = ""  # of the run, for people


@dataclass(frozen=True)
class Sent:
    """What is there. ``identity`` is that of the training, ``last_step`` -1 before the first step."""

    run_id: str
    place: str
    identity: str
    began_seconds: float  # wall clock: with it a step has the same time whenever it is sent
    last_step: int = -1
    read_bytes: int = 0  # of the metrics, up to the end of that step
    results: str = ""  # which results were sent; empty: none


def read_sent(tracker: str) -> Sent | None:
    """None where nothing was sent, or nobody can say what."""
    try:
        return read_record(path_of(tracker), Sent)
    except (OSError, ValueError, TypeError):
        return None


def path_of(tracker: str) -> Path:
    """The file about one tracker."""
    return FOLDER / f"{tracker}.json"

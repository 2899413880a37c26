"""The files of an unfinished run, by name: enough to throw them away without opening them."""

import shutil
from pathlib import Path

POINTER = "training_state.json"
CHECKPOINTS = "checkpoint_epoch_*_step_*"
BAD_UPDATES = "bad_updates"
HALF_WRITTEN = (".checkpoint*", ".adapter*")


def discard_run(output: Path) -> int:
    """Remove the pointer, all checkpoints, bad updates, what a killed process left half written.

    Returns how many checkpoints.
    """
    (output / POINTER).unlink(missing_ok=True)
    checkpoints = list(output.glob(CHECKPOINTS))
    for folder in [*checkpoints, *(found for pattern in HALF_WRITTEN for found in output.glob(pattern))]:
        shutil.rmtree(folder)
    shutil.rmtree(output / BAD_UPDATES, ignore_errors=True)
    return len(checkpoints)

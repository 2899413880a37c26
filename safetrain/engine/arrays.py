"""Named arrays in safetensors files, with a full disk told as what it is."""

import errno
import os
from pathlib import Path

import mlx.core as mx

from safetrain.core.errors import TrainingError

EMPTY = "__empty__"


def save_arrays(path: Path, arrays: dict[str, mx.array]) -> None:
    """Write arrays by name; a marker stands in for none, because safetensors files may not be empty.

    Raises OSError when the disk refuses: mlx says RuntimeError then, which would pass for a fault of the program.
    """
    try:
        mx.save_safetensors(str(path), arrays or {EMPTY: mx.zeros((1,))}, metadata={"format": "mlx"})
    except RuntimeError as error:
        if "Unable to write" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def require_same(path: Path, values: dict[str, mx.array]) -> None:
    """Compare a file with what was to be written, one array in memory at a time.

    Raises TrainingError when the disk returns other numbers than it was given.
    """
    written = mx.load(str(path))
    for name, value in values.items():
        if not isinstance(written, dict) or not mx.array_equal(written.pop(name), value, equal_nan=True).item():
            raise TrainingError(
                f"The disk returned other numbers than were written ({name}).",
                where=str(path),
                do="the checkpoint before is whole; look after this disk, then run the same command again",
            )


def load_arrays(path: Path) -> dict[str, mx.array]:
    """Read what ``save_arrays`` wrote, into memory; raises OSError, ValueError or RuntimeError when it is not whole."""
    loaded = mx.load(str(path))
    if not isinstance(loaded, dict):
        raise ValueError(f"{path.name} holds no named arrays")
    arrays = {name: value for name, value in loaded.items() if name != EMPTY}
    mx.eval(list(arrays.values()))
    return arrays

"""Named arrays in safetensors files, with a full disk told as what it is."""

import errno
import json
import os
from pathlib import Path

import mlx.core as mx

from safetrain.core.errors import TrainingError

EMPTY = "__empty__"
SHARD_BYTES = 2**29  # of a model's weight files: what is in memory while one is written


def save_arrays(path: Path, arrays: dict[str, mx.array], kind: str = "mlx") -> None:
    """Write arrays by name; a marker stands in for none, because safetensors files may not be empty.

    ``kind``: the library that the file's metadata names, for those that ask.

    Raises OSError when the disk refuses: mlx says RuntimeError then, which would pass for a fault of the program.
    """
    try:
        mx.save_safetensors(str(path), arrays or {EMPTY: mx.zeros((1,))}, metadata={"format": kind})
    except RuntimeError as error:
        if "Unable to write" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def save_shards(folder: Path, arrays: dict[str, mx.array]) -> None:
    """Write a model's weights and their index, as mlx-lm names them, and take each out of ``arrays`` when it is there.

    What is not computed yet is computed array by array, and only for the file that comes next. Raises OSError.
    """
    shards, size = list[list[str]](), SHARD_BYTES
    total = sum(value.nbytes for value in arrays.values())
    for name, value in arrays.items():
        if not shards or size + value.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += value.nbytes
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        shard = {name: arrays.pop(name) for name in names}
        for value in shard.values():
            mx.eval(value)
        save_arrays(folder / file, shard)
        places |= dict.fromkeys(names, file)
        del shard, value
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4), encoding="utf-8")


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

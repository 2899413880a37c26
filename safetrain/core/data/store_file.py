"""A safetensors file by its parts: 8 bytes of header length, JSON, little-endian arrays one after the other."""

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from safetrain.core.errors import DataError

DTYPES = {"U8": np.uint8, "BOOL": np.bool_, "U32": np.uint32, "U64": np.uint64}
COPY_BYTES = 2**20


def dtype_of(kind: str) -> np.dtype:
    """NumPy's name of a kind of safetensors."""
    return np.dtype(DTYPES[kind]).newbyteorder("<")


def write_parts(path: Path, metadata: Mapping[str, str], arrays: Mapping[str, tuple[str, BinaryIO]]) -> None:
    """Write a file: of each array its kind, and a file that holds its values and stands at its end."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    order = sorted(arrays, key=lambda name: -dtype_of(arrays[name][0]).itemsize)
    for name in order:  # the widest numbers first, so that all are aligned
        kind, values = arrays[name]
        size = values.tell()
        count = size // dtype_of(kind).itemsize
        header[name] = {"dtype": kind, "shape": [count], "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            arrays[name][1].seek(0)
            shutil.copyfileobj(arrays[name][1], file, COPY_BYTES)


def read_parts(path: Path) -> tuple[dict[str, Any], int]:
    """The header and where the arrays begin; raises DataError for a file that is not as long as it says."""
    size = os.stat(path).st_size  # noqa: PTH116
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= size - 8:
            raise damaged(path)
        text = file.read(length)
    try:
        header = json.loads(text)
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise damaged(path) from None
    if size != 8 + length + end:
        raise damaged(path)
    return header, 8 + length


def damaged(path: Path) -> DataError:
    """The error for a token store that is not as it was written."""
    return DataError(
        "The token store is damaged, or of another version.", where=str(path), do="run 'dvc repro -f -s validate_data'"
    )

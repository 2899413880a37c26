"""Quantizes a model with mlx-lm: the folder whole or not at all."""

import tempfile
from pathlib import Path

from mlx_lm.convert import convert

from safetrain.core.errors import ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.storage.files import replace_directory


def quantize(source: Path, target: Path, bits: int, group_size: int) -> None:
    """Write ``source`` with ``bits`` per weight to ``target``; raises ModelError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert-") as scratch:
        temporary = Path(scratch) / "new"
        try:
            convert(str(source), mlx_path=str(temporary), quantize=True, q_bits=bits, q_group_size=group_size)
        except (ValueError, KeyError, RuntimeError) as error:
            raise ModelError(f"mlx-lm cannot convert the model: {error}", where=str(source)) from error
        read_model_files(temporary)
        replace_directory(temporary, target)

"""A model folder as files: whether it is complete, its size and its shape. Reads headers, no weights, without mlx."""

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.errors import ModelError
from safetrain.core.formatting import similar_path
from safetrain.core.model.config import POSITIONS, VOCABULARY, first_of, sizes_of, with_text
from safetrain.core.model.quantization import quantization_of, usual_bits, with_quantization
from safetrain.core.model.shapes import TensorHeader, tensors_of
from safetrain.core.storage.files import FETCH_LFS, LFS_POINTER

MAX_HEADER_BYTES = 100 * 2**20
SAMPLE_BLOCK_BYTES, SAMPLE_BLOCKS = 2**16, 512  # a fingerprint reads at most 32 MiB of a file
LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
TAKEN_APART = ("gemma2", "cohere", "granite")  # by engine/upstream/adaptation.py (tests/engine/test_architectures.py)
FETCH = "fetch it again: safetrain fetch HUB_ID"


@dataclass(frozen=True)
class ModelFiles:
    """What the folder says about the model. Widths are in features, ``static_bytes`` is the size of all tensors."""

    folder: Path
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    whole_logits: bool  # the model does more to its logits than the head: all of them are made
    quantization_bits: int | None
    static_bytes: int
    tensors: tuple[TensorHeader, ...]
    fingerprint: str

    @property
    def parameters(self) -> int:
        """Number of weights, quantized ones counted one by one; scales and biases of a quantization are not weights."""
        return sum(tensor.weights for tensor in self.tensors)

    @property
    def compute_bytes(self) -> int:
        """Bytes of one number in the residual stream: that of the norms and scales, 2 unless they are float32."""
        floats = [t for t in self.tensors if t.dtype in ("F32", "F16", "BF16")]
        return 4 if floats and all(t.dtype == "F32" for t in floats) else 2

    @property
    def in_bfloat16(self) -> bool:
        """Whether any of its numbers are stored in that type, as scales of a quantization are."""
        return any(tensor.dtype == "BF16" for tensor in self.tensors)


def read_model_files(folder: Path) -> ModelFiles:
    """Check that ``folder`` holds a whole model and describe it; raises ModelError with the file that is wrong."""
    if not folder.is_dir():
        raise _no_model(folder)
    config = _read_json(folder / "config.json")
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file():
        raise ModelError("The model has no tokenizer (tokenizer.json).", where=str(folder), do=FETCH)
    paths = _weight_files(folder)
    headers = [_read_header(path) for path in paths]
    tensors = tuple(tensor for header in headers for tensor in header)
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in paths:
        digest.update(_file_sample(path))
    return _describe(folder, config, tensors, digest.hexdigest())


def read_limits(folder: Path) -> tuple[int | None, int | None]:
    """Rows of the embedding and tokens of the context, by config.json, without weights; None where it says neither."""
    config = with_text(_read_json(folder / "config.json"))
    return first_of(config, VOCABULARY) or None, first_of(config, POSITIONS) or None


def read_model_plan(path: Path) -> ModelFiles:
    """A model to plan for: a whole folder, a folder that has only config.json, or a config.json by itself.

    Without weight files the tensors are those that the architecture has; raises ModelError where it is not known.
    """
    if not path.exists():
        raise _no_model(path)
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and (any(path.glob("model*.safetensors")) or (path / "model.safetensors.index.json").is_file()):
        return read_model_files(path)
    file = path / "config.json" if path.is_dir() else path
    config = _read_json(file)
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    try:
        return _describe(folder, config, tensors_of(with_text(config)), digest)
    except KeyError as error:
        raise ModelError(f"config.json has no {error}.", where=str(file)) from None


def model_of_config(config: dict[str, Any], folder: Path) -> ModelFiles:
    """A model that is only described, by what would be its config.json; ``folder`` is what it is called."""
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16).hexdigest()
    return _describe(folder, config, tensors_of(config), digest)


def _describe(folder: Path, config: dict[str, Any], headers: Iterable[TensorHeader], fingerprint: str) -> ModelFiles:
    """The record; raises ModelError when neither config.json nor the weights say what is needed."""
    quantization, config = quantization_of(config), with_text(config)
    tensors = with_quantization(headers, quantization)
    sizes = sizes_of(config, tensors)
    if isinstance(sizes, str):
        raise ModelError(
            f"config.json has no {sizes}, and the weights do not say it.",
            where=str(folder / "config.json"),
            do="use a model that mlx-lm supports",
        )
    return ModelFiles(
        folder=folder,
        model_type=str(config.get("model_type", "unknown")),
        hidden_size=sizes.hidden,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.key_heads,
        head_dim=sizes.head,
        intermediate_size=sizes.feed_forward,
        vocab_size=sizes.vocabulary,
        max_positions=sizes.positions,
        whole_logits=config.get("model_type") not in TAKEN_APART and any(config.get(key) for key in LOGIT_KEYS),
        quantization_bits=usual_bits(tensors, quantization),
        static_bytes=sum(tensor.size_bytes for tensor in tensors),
        tensors=tensors,
        fingerprint=fingerprint,
    )


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files: those of the index, if there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map", {})
        names = sorted(set(weight_map.values()))
        if foreign := [name for name in names if Path(name).name != name]:
            raise ModelError(
                f"The model's index names a file outside of its folder: {foreign[0]}.", where=str(index), do=FETCH
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"The model is half downloaded: {len(missing)} of {len(names)} weight files are missing.",
                where=str(folder),
                got=f"missing: {', '.join(missing[:5])}",
                do=FETCH,
            )
        return [folder / name for name in names]
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise ModelError("The model folder has no weights (model*.safetensors).", where=str(folder), do=FETCH)
    return paths


def _read_header(path: Path) -> list[TensorHeader]:
    """The tensors of one safetensors file; raises ModelError when the file is shorter than its header says.

    Format: an 8-byte little-endian length, that many bytes of JSON, then the data (huggingface/safetensors, README).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if LFS_POINTER.startswith(start) and len(start) == 8:
            raise ModelError(
                "A weight file is a pointer of Git LFS: the weights themselves are not here yet.",
                where=str(path),
                do=FETCH_LFS,
            )
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise _truncated(path, "a safetensors header", f"{size} bytes")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise _truncated(path, "a safetensors header", "bytes that are not one") from None
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        raise _truncated(path, f"{end} bytes, by its header", f"{size} bytes")
    return [
        TensorHeader(name, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
    ]


def _truncated(path: Path, expected: str, got: str) -> ModelError:
    return ModelError(
        "A weight file is damaged or half downloaded.", where=str(path), expected=expected, got=got, do=FETCH
    )


def _file_sample(path: Path) -> bytes:
    """Size, beginning, end and evenly spread blocks of a file, all of a small one: tells fine-tuned twins apart."""
    size = path.stat().st_size
    step = max(SAMPLE_BLOCK_BYTES, (size - SAMPLE_BLOCK_BYTES) // SAMPLE_BLOCKS)
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for start in [*range(0, size, step), max(0, size - SAMPLE_BLOCK_BYTES)]:
            file.seek(start)
            digest.update(file.read(SAMPLE_BLOCK_BYTES))
    return digest.digest()


def _no_model(path: Path) -> ModelError:
    """For a path where nothing is; one like ``owner/name`` may be a name on the hub."""
    is_hub_id = not path.is_absolute() and len(path.parts) == 2 and path.parts[0] not in ("models", "..")
    do = "correct the path (model.path in params.yaml), or fetch a model: safetrain fetch HUB_ID"
    if similar := similar_path(path):
        do = similar
    elif is_hub_id:
        do = f"safetrain fetch {path}, then name its folder: models/{path.name}"
    return ModelError("The model folder does not exist.", where=str(path), do=do)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not path.parent.exists():
            raise _no_model(path.parent) from None
        raise ModelError(f"The model has no {path.name}.", where=str(path.parent), do=FETCH) from None
    except ValueError as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}", where=str(path), do=FETCH) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} must be a JSON object.", where=str(path), do=FETCH)
    return value

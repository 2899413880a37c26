"""Checks a model folder and reads its size, shape and blocks from headers, without mlx.

A config.json may leave out sizes for which mlx-lm has a default, or that the family does not have: a recurrent model
has no attention heads. These sizes are derived from the weights, or set to a usual value; only the memory estimate
uses them.
"""

import fnmatch
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.errors import ModelError
from safetrain.core.foreign import told
from safetrain.core.formatting import similar_path
from safetrain.core.model.shapes import TensorHeader, quantization_of, tensors_of, usual_bits, with_quantization
from safetrain.core.storage.files import FETCH_LFS, LFS_POINTER, json_object

METADATA, MAX_HEADER_BYTES = "__metadata__", 100 * 2**20  # of a safetensors file
SAMPLE_BLOCK_BYTES, SAMPLE_BLOCKS = 2**16, 512  # a fingerprint reads at most 32 MiB of a file
LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
TAKEN_APART = ("gemma2", "cohere", "granite")  # by engine/upstream/adaptation.py (tests/engine/test_architectures.py)
FETCH = "fetch it again: safetrain fetch HUB_ID"
BY_TYPE = "use a copy with model*.safetensors: safetrain fetch HUB_ID"
OTHER_KINDS = (  # what a folder without a whole model may hold, by its files, and what to do
    ("adapter_model.*", "a PEFT adapter", "merge it into its base with PEFT (merge_and_unload), and use the result"),
    ("adapters.safetensors", "an adapter", "name its base model here, and merge the two with safetrain fuse"),
    ("*.gguf", "a GGUF file", BY_TYPE),
    ("*.onnx", "an ONNX file", BY_TYPE),
    ("pytorch_model*.bin", "a file of PyTorch", BY_TYPE),
    ("*.pt*", "a file of PyTorch", BY_TYPE),
    ("consolidated*.safetensors", "a file in Mistral's own format", BY_TYPE),
)

SIZES = {  # names of a size in mlx_lm/models/*.py; the first that config.json has counts
    "hidden_size": ("hidden_size", "n_embd", "model_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_transformer_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions", "model_max_length"),
}
USUAL_HEAD_SIZE, USUAL_FEED_FORWARD = 64, 4  # the second as a multiple of the width
MOST_LAYERS, MOST_SIZE = 10_000, 2**31 - 1  # the second: of an array's side in mlx
MODEL_TYPE = re.compile(r"[\w.-]{1,64}")
UNUSABLE = "config.json cannot be used"
EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|tok_embeddings|word_embeddings|embeddings?|embed_in|wte)\.weight$")
IN_BLOCK = re.compile(r"(?:^|[._])(?:layers|h|blocks)\.(\d+)\.(.+)$")  # number of a block, name in the block
OTHER_PART = re.compile(r"^(?:model\.)?(?:vision|visual|audio|multi_modal|mm_projector|mtp\.)")  # left out by mlx-lm
NO_LINEAR = re.compile(r"(?:^|[._])(?:conv|conv1d|conv_1d|embed_q|unembed_out|g_norm)$")  # layers without an adapter

TOKENIZERS = ("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt")  # each is enough
TOKENIZER_FILES = (  # files that determine tokenization, the chat template and stop ids
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates/*.jinja"
SOURCE = ".hub_id"  # the model's Hub ID, and on the second line the commit


@dataclass(frozen=True)
class ModelFiles:
    """A description of the model. Widths are in features; ``static_bytes`` is the size of all tensors."""

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
    whole_logits: bool  # the model changes the logits after the head, so all of them are computed
    quantization_bits: int | None
    static_bytes: int
    tensors: tuple[TensorHeader, ...]
    fingerprint: str

    @property
    def parameters(self) -> int:
        """The number of weights, counting each quantized weight; scales and biases of a quantization do not count."""
        return sum(tensor.weights for tensor in self.tensors)

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the residual stream, as in norms and scales: 2, unless these are all float32."""
        return 4 if {tensor.dtype for tensor in self.tensors} & {"F32", "F16", "BF16"} == {"F32"} else 2

    @property
    def in_bfloat16(self) -> bool:
        """Whether any tensor is in bfloat16, such as the scales of a quantization."""
        return any(tensor.dtype == "BF16" for tensor in self.tensors)


def read_model_files(folder: Path) -> ModelFiles:
    """Check that ``folder`` holds a complete model and describe it; raises ModelError with the faulty file."""
    config = _read_json(folder / "config.json")
    if not any(all((folder / name).is_file() for name in names) for names in TOKENIZERS):
        raise _without("The model has no tokenizer (tokenizer.json).", folder)
    if any(path.is_fifo() or path.is_char_device() for path in folder.iterdir()):
        raise ModelError("A pipe or a device lies in the model's folder.", where=folder, do="remove it")
    with told("The model's weights cannot be read", folder, FETCH):
        paths = _weight_files(folder)
        tensors = [tensor for path in paths for tensor in _tensors_in(path)]
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in paths:
        digest.update(_file_sample(path))
    return _describe(folder, config, tensors, digest.hexdigest())


def read_limits(folder: Path) -> tuple[int | None, int | None]:
    """The vocabulary size and the context in tokens, from config.json; None for a number that it does not have."""
    config = _read_json(folder / "config.json")
    with told(UNUSABLE, folder / "config.json"):
        config = _with_text(config)
        return _stated(config, "vocab_size") or None, _stated(config, "max_positions") or None


def read_model_plan(path: Path) -> ModelFiles:
    """Read a model to plan for: a complete folder, a folder with only config.json, or a config.json file.

    Without weight files, the tensors follow from the architecture; raises ModelError if it is unknown.
    """
    weights = "model*.safetensors*", *(pattern for pattern, _, _ in OTHER_KINDS)
    if any(any(path.glob(pattern)) for pattern in weights):  # also those that no run could open
        return read_model_files(path)
    file = path if path.is_file() and path.suffix == ".json" else path / "config.json"
    return model_of_config(_read_json(file), file.parent)


def model_of_config(config: Mapping[str, Any], folder: Path) -> ModelFiles:
    """Describe a model by its config.json alone; errors name ``folder``."""
    with told(UNUSABLE, folder / "config.json"):
        digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16).hexdigest()
        tensors = tensors_of(_with_text(config))
    return _describe(folder, config, tensors, digest)


def _describe(folder: Path, config: Mapping[str, Any], headers: Iterable[TensorHeader], fingerprint: str) -> ModelFiles:
    """Make the description; raises ModelError if neither config.json nor the weights give a size."""
    with told(UNUSABLE, folder / "config.json"):
        quantization, config = quantization_of(config, str(folder)), _with_text(config)
        tensors = with_quantization(headers, quantization)
        return ModelFiles(
            **sizes_of(config, tensors, folder),
            folder=folder,
            model_type=config.get("model_type", "unknown"),
            whole_logits=config.get("model_type") not in TAKEN_APART and any(config.get(key) for key in LOGIT_KEYS),
            quantization_bits=usual_bits(tensors, quantization),
            static_bytes=sum(tensor.size_bytes for tensor in tensors),
            tensors=tensors,
            fingerprint=fingerprint,
        )


def _with_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the keys of a multimodal model's text part at the top level.

    Raises ValueError for sizes that no model has, before anything is computed with them.
    """
    joined = {**config, **(config.get("text_config") or {})}
    if not MODEL_TYPE.fullmatch(joined.get("model_type", "unknown")):
        raise ValueError("its model_type is not a name")
    for size in SIZES:
        _stated(joined, size)
    return joined


def sizes_of(config: Mapping[str, Any], tensors: Sequence[TensorHeader], folder: Path) -> dict[str, Any]:
    """Sizes of a model, keyed by ModelFiles' field names; the largest if layers differ.

    Raises ModelError for a size that neither config.json nor the weights give.
    """
    rows, width = next((t.dequantized_shape for t in tensors if EMBEDDING.search(t.name) and len(t.shape) == 2), (0, 0))
    blocks = [int(match[1]) for tensor in tensors if (match := IN_BLOCK.search(tensor.name))]
    sizes = {name: _stated(config, name) for name in SIZES}
    for name, size in (("hidden_size", width), ("num_layers", max(blocks, default=-1) + 1), ("vocab_size", rows)):
        sizes[name] = sizes[name] or size
        if not sizes[name]:
            what = f"config.json has no {SIZES[name][0]}, and the weights do not show it."
            raise ModelError(what, where=folder / "config.json", do="use a model that mlx-lm supports")
    _require_possible("num_layers", sizes["num_layers"])
    hidden, head = sizes["hidden_size"], sizes["head_dim"]
    heads = sizes["num_heads"] or max(1, hidden // (head or USUAL_HEAD_SIZE))
    return {
        **sizes,
        "num_heads": heads,
        "num_kv_heads": min(heads, sizes["num_kv_heads"] or heads),
        "head_dim": head or max(1, hidden // heads),
        "intermediate_size": sizes["intermediate_size"] or USUAL_FEED_FORWARD * hidden,
        "max_positions": sizes["max_positions"] or None,
    }


def _stated(config: Mapping[str, Any], size: str) -> int:
    """A size in config.json, or the largest number of a list there; 0 if it is missing or not positive.

    Raises ValueError if it is larger than in any model.
    """
    for name in SIZES[size]:
        value = config.get(name)
        numbers = [n for n in (value if isinstance(value, list) else [value]) if type(n) is int]
        if numbers and max(numbers) > 0:
            _require_possible(size, max(numbers))
            return max(numbers)
    return 0


def _require_possible(size: str, number: int) -> None:
    if number > (MOST_LAYERS if size == "num_layers" else MOST_SIZE):
        raise ValueError(f"its {size} is larger than in any model")


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that mlx-lm loads; raises ModelError if the index names missing files."""
    paths = sorted(path for path in folder.glob("model*.safetensors") if path.is_file())  # no pipe, which never ends
    index = folder / "model.safetensors.index.json"
    names = set(_read_json(index).get("weight_map", {}).values()) if index.is_file() else set()
    if missing := sorted(names - {path.name for path in paths}):
        what = f"The model is not fully downloaded: {len(missing)} of {len(names)} weight files are missing."
        raise ModelError(what, where=folder, got=f"missing: {', '.join(missing[:5])}", do=FETCH)
    if not paths:
        raise _without("The model folder has no weights (model*.safetensors).", folder)
    if names and (extra := [path.name for path in paths if path.name not in names]):
        what = "The folder has weight files that its index does not name; mlx-lm would load them too."
        do = "remove them, or fetch the model into a new folder"
        raise ModelError(what, where=folder, got=", ".join(extra[:5]), do=do)
    return paths


def _without(what: str, path: Path) -> ModelError:
    """The error for a path that is not a whole model: ``what``, unless its files show what it is instead."""
    files = [path.name] if path.is_file() else [file.name for file in path.iterdir()]
    for pattern, kind, do in OTHER_KINDS:
        if found := fnmatch.filter(files, pattern):
            return ModelError(f"This is {kind}, not a model for mlx-lm.", where=path, got=found[0], do=do)
    return ModelError(what, where=path, do=FETCH)


def _tensors_in(path: Path) -> list[TensorHeader]:
    """The tensors of a weight file; raises ModelError if it is damaged."""
    try:
        header, _ = read_header(path)
    except ValueError as error:
        what, do = "A weight file is damaged or not fully downloaded.", FETCH
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                what, do = "A weight file is a Git LFS pointer: the weights are not downloaded yet.", FETCH_LFS
        got = f"{path.stat().st_size} bytes"
        raise ModelError(what, where=path, expected=str(error), got=got, do=do) from None
    return [_tensor(name, **entry) for name, entry in header.items() if name != METADATA]


def _tensor(name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> TensorHeader:
    """A tensor as its header describes it; raises ValueError if its shape needs other bytes than it has."""
    size = data_offsets[1] - data_offsets[0]
    width = re.search(r"\d+", dtype)  # bits, except of BOOL
    bits = math.prod(shape) * (int(width[0]) if width else 8)
    if any(type(side) is not int or side < 0 for side in shape) or not -8 < bits - 8 * size <= 0:
        raise ValueError(f"{name} has a shape that does not fit its bytes")
    return TensorHeader(name, dtype, tuple(shape), size)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file; also returns where its data begins.

    Format: an 8-byte little-endian length, that many bytes of JSON, then the data (huggingface/safetensors, README).
    Raises ValueError, which names the expected content, if the file is damaged or its size is not as in its header.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(size - 8, MAX_HEADER_BYTES) else b""
    try:
        header = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != METADATA]
        end = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise ValueError("a safetensors header") from None
    if size != end:
        raise ValueError(f"{end} bytes, by its header")
    return header, 8 + length


def header_of(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file of these tensors: name, type, shape and bytes of each, in the order of the data.

    Its length is a multiple of 8.
    """
    header, place = dict[str, Any]({METADATA: metadata}), 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _file_sample(path: Path) -> bytes:
    """Hash a file's size and evenly spaced blocks, which distinguishes fine-tuned copies; a small file as a whole."""
    size = path.stat().st_size
    step = max(SAMPLE_BLOCK_BYTES, (size - SAMPLE_BLOCK_BYTES) // SAMPLE_BLOCKS)
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for start in [*range(0, size, step), max(0, size - SAMPLE_BLOCK_BYTES)]:
            file.seek(start)
            digest.update(file.read(SAMPLE_BLOCK_BYTES))
    return digest.digest()


def _no_model(path: Path) -> ModelError:
    """The error for a path that is not a folder; ``owner/name`` may be a Hub ID."""
    if path.is_file():
        return _without("This file is not a model folder.", path)
    do = "correct the path (model.path in params.yaml), or fetch a model: safetrain fetch HUB_ID"
    if not path.is_absolute() and len(path.parts) == 2 and path.parts[0] not in ("models", ".."):
        do = f"safetrain fetch {path}, then use its folder: models/{path.name}; before: safetrain estimate hub:{path}"
    return ModelError("The model folder does not exist.", where=path, do=similar_path(path) or do)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model; raises ModelError."""
    if not path.parent.is_dir():
        raise _no_model(path.parent)
    if not path.is_file():
        raise _without(f"The model has no {path.name}.", path.parent)
    value = json_object(path)
    if not value:
        raise ModelError(f"{path.name} is empty, or not a JSON object.", where=path, do=FETCH)
    return value


# Blocks


def in_blocks(model: ModelFiles) -> Iterator[tuple[int, str, TensorHeader]]:
    """Yield block number, name in the block, and header of every tensor in a block."""
    for tensor in model.tensors:
        if (match := IN_BLOCK.search(tensor.name)) and not OTHER_PART.match(tensor.name):
            yield int(match[1]), match[2], tensor


def adapted_weights(model: ModelFiles) -> Iterator[tuple[int, str, TensorHeader]]:
    """Yield block number, name in the block, and weight of every layer that can have an adapter.

    In a few families, mlx-lm gives no adapter to a router or a shared block; these are yielded all the same.
    """
    for block, name, tensor in in_blocks(model):
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and len(tensor.shape) >= 2 and not NO_LINEAR.search(layer):
            yield block, layer, tensor


# The tokenizer, compared without loading it


def tokenizer_hash(folder: Path) -> str:
    """Hash names and contents of the files in ``folder`` that define the tokenizer, chat template and stop ids."""
    state = hashlib.blake2b(digest_size=16)
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for path in [*files, *sorted(folder.glob(TEMPLATES))]:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "blake2b")
        state.update(f"{path.relative_to(folder).as_posix()}\0".encode() + content.digest())
    return state.hexdigest()


def license_of(base: Path) -> str:
    """Return the licence named in the head of the base model's card; empty if there is none."""
    path = base / "README.md"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    head = text[4:].partition("\n---")[0] if text.startswith("---\n") else ""
    name = next((line.partition(":")[2].strip(" '\"") for line in head.splitlines() if line.startswith("license:")), "")
    return name if name.replace("-", "").replace(".", "").isalnum() else ""


def hub_id_of(folder: Path) -> str:
    """The Hub ID of a folder that safetrain fetched; empty for any other folder."""
    path = folder / SOURCE
    return path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else ""

"""Writes a tuned model as a GGUF file, and reads and measures it before it gets its final name.

The gguf package has llama.cpp's names for weights. Their layout and the settings that llama.cpp needs are in its
code: src/models/FAMILY.cpp and conversion/FAMILY.py. Weights are written and read one at a time.
"""

import gc
import itertools
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten

from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import read_prompt_format
from safetrain.core.records.evaluation import ExportReport
from safetrain.core.storage.files import full_disk_named, require_new, require_room, write_atomic, write_record
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.engine.backend import set_limits
from safetrain.engine.layers import dequantized, inputs_of, slices_of
from safetrain.engine.model import BaseModel, dequantize_to_answer
from safetrain.engine.upstream.adaptation import adapt
from safetrain.engine.upstream.loading import errors_told, ready_to_compute, rebuilt
from safetrain.export.comparison import ExportComparison, ExportJob, require_memory
from safetrain.export.fuse import Changes, open_to_merge
from safetrain.export.gguf_text import write_chat, write_vocabulary

FAMILIES = {  # llama.cpp's architectures by model_type in config.json
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3",
    "gemma3_text": "gemma3", "phi3": "phi3",
}  # fmt: skip
LONG = ("longrope", "su")
ROTATIONS = {"llama": ("llama3",), "phi3": LONG}  # rotary scalings, besides default and linear
DEFAULT_CONTEXT = 8192  # for gemma2, whose settings in mlx-lm have none
STRIPPING = "phi-3"  # if it is in a model's name, llama.cpp drops white space after special tokens

BLOCK = 32  # numbers that share a scale in q8_0 and q4_0
KINDS = {"f16": Kind.F16, "bf16": Kind.BF16, "q8_0": Kind.Q8_0, "q4_0": Kind.Q4_0}
PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
READ_BITS = 8  # of quantized weights that are read back
FLOAT_BYTES, READ_BYTES = 2, 1.25  # of a weight that is read back: in 16 bits; in 8 bits with scales and biases
AT_THE_ENDS = ("token_embd.weight", "output.weight")  # every token passes through them
QUANTIZER = "llama-quantize"  # llama.cpp's program, for types that are not in KINDS
LAST_WORDS = 400  # characters of its output, if it fails
Info = tuple[str, tuple[int, ...], int, Kind]  # a tensor's name, shape and bytes in the file, and its type
KEEP_MLX = "keep it as an MLX model: safetrain fuse OUT"


def report_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")


def export_gguf(job: ExportJob, kind: str, say: Callable[[str], None]) -> ExportReport:
    """Write ``job.out`` and its report; ``kind`` is one of KINDS, or one that llama-quantize makes.

    Raises ConfigError, ModelError if llama.cpp does not support the model or the file loses too much of the
    improvement, DiskFullError, and MachineError if memory is too small to measure the file.
    """
    for path in (job.out, report_of(job.out)):
        require_new(path, "choose another name, or remove it")
    if kind not in KINDS and shutil.which(QUANTIZER) is None:
        raise ConfigError(
            f"{kind} needs llama.cpp's {QUANTIZER}, which is not installed.",
            do="install it: brew install llama.cpp (or build github.com/ggml-org/llama.cpp); or choose --type q8_0 or "
            "q4_0, which safetrain writes itself",
        )
    parent, reports = job.out.parent.resolve(), list[ExportReport]()

    def write(path: Path) -> None:
        reports.append(_exported(job, kind, path, say))
        write_record(report_of(job.out), reports[0])

    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        write_atomic(job.out, write)
    return reports[0]


def _exported(job: ExportJob, kind: str, path: Path, say: Callable[[str], None]) -> ExportReport:
    """Measure the tuned model, write it to ``path``, and measure what was written."""
    files, stored = read_model_files(job.base), KINDS.get(kind, Kind.F16)
    architecture = architecture_of(files.model_type, job.base)
    module, config, changes = open_to_merge(job.base, job.adapter)
    parts, writer = parts_of(module, architecture), gguf.GGUFWriter(None, architecture)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{stored.name}"])
    divisors = write_shape(writer, text_model(module))
    _write_texts(writer, job, text_model(module).args.vocab_size)
    infos = [(name, values.shape, values.nbytes, Kind.F32) for name, values in divisors.items()]
    infos += [(part.name, part.shape, part.bytes_as(stored), part.stored_as(stored)) for part in parts]
    do = "free some space, choose a folder on another disk, or fewer bits with --type"
    disk = sum(each_bytes for _, _, each_bytes, _ in infos)
    require_room(path.parent, disk, "There is too little disk space for the GGUF file.", do)
    size = int((FLOAT_BYTES if KINDS.get(kind) in PLAIN else READ_BYTES) * sum(math.prod(part.shape) for part in parts))
    do = "close other programs, choose --type q8_0 or fewer bits, or export on a larger machine"
    require_memory(size, "the GGUF file", do)
    comparison = ExportComparison(job, files, say)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".gguf-") as scratch:
        unquantized = path if kind in KINDS else Path(scratch) / path.name
        data = (taken(part, module, changes, stored) for part in parts)
        _write_tensors(writer, unquantized, infos, itertools.chain(divisors.values(), data))
        if unquantized != path:
            _quantize(unquantized, path, kind)
    del module, changes, writer, data
    gc.collect()
    set_limits(job.mlx_limit_bytes + max(0, size - files.static_bytes))
    with errors_told("open the written model", path):
        module, dequantize = rebuilt(config, dict(arrays_in(path, parts))), dequantize_to_answer(files)
        module = ready_to_compute(module, dequantize=dequantize, compute_dtype=job.compute_dtype)
    model, name = BaseModel(module, frozenset(), *adapt(module)), f"{job.out.name} ({kind})"
    report, refused = comparison.of(model, name, kind, path.stat().st_size)
    if refused is not None:
        raise refused
    return report


def _write_texts(writer: gguf.GGUFWriter, job: ExportJob, size: int) -> None:
    """Write the name, the tokenizer and the chat settings into the metadata. ``size``: rows of the embedding."""
    tokenizer = ChatTokenizer(job.base)
    strips = writer.arch == "phi3" and any(token["rstrip"] for token in tokenizer.definition["added_tokens"])
    writer.add_name(f"{job.out.stem} ({STRIPPING})" if strips else job.out.stem)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_vocabulary(writer, tokenizer.definition, size, chats=bool(tokenizer.template), where=job.base)
    write_chat(writer, tokenizer, read_prompt_format(job.adapter), size)


def _write_tensors(writer: gguf.GGUFWriter, path: Path, infos: Iterable[Info], data: Iterable[np.ndarray]) -> None:
    for name, shape, size, kind in infos:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in data:
            writer.write_tensor_data(values)
    finally:
        writer.close()


def _quantize(source: Path, target: Path, kind: str) -> None:
    """Run llama-quantize; raises ModelError with the end of its output if it fails."""
    command = [QUANTIZER, str(source), str(target), kind.upper()]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode != 0:
        words = " ".join((process.stderr or process.stdout).split())[-LAST_WORDS:]
        do = "choose --type q8_0 or q4_0, which safetrain writes itself"
        raise ModelError(f"{QUANTIZER} cannot make {kind}.", got=words or f"exit code {process.returncode}", do=do)


def architecture_of(model_type: str, where: Path) -> str:
    """llama.cpp's name for a model type; raises ModelError if this type cannot be exported as a GGUF file."""
    if model_type not in FAMILIES:
        raise ModelError(
            f"Models of the type {model_type} cannot be exported as GGUF files.",
            where=where,
            expected=f"one of {', '.join(FAMILIES)}",
            do="keep it as an MLX model (safetrain fuse OUT), or run safetrain fuse OUT --float and convert OUT with "
            "llama.cpp's convert_hf_to_gguf.py",
        )
    return FAMILIES[model_type]


def text_model(module: Any) -> Any:
    """The language model in a module: gemma3 also has a vision model."""
    return module.get("language_model", module)


def write_shape(writer: gguf.GGUFWriter, module: Any) -> dict[str, np.ndarray]:
    """Write the metadata from which llama.cpp builds ``module``, a text model; returns extra tensors for the file.

    They divide the rotary frequencies: float32, (rotated numbers / 2,). Raises ModelError for a setting of the model
    that llama.cpp does not support.
    """
    args = module.args
    head = int(getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads)
    context = getattr(args, "max_position_embeddings", None) or DEFAULT_CONTEXT
    writer.add_context_length(context)
    writer.add_embedding_length(args.hidden_size)
    writer.add_block_count(args.num_hidden_layers)
    writer.add_feed_forward_length(args.intermediate_size)
    writer.add_head_count(args.num_attention_heads)
    writer.add_head_count_kv(args.num_key_value_heads)
    writer.add_layer_norm_rms_eps(args.rms_norm_eps)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(args.vocab_size)
    writer.add_rope_dimension_count(int(head * getattr(args, "partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(args.rope_theta))
    if writer.arch == "gemma2":
        writer.add_attn_logit_softcapping(args.attn_logit_softcapping)
        writer.add_final_logit_softcapping(args.final_logit_softcapping)
        writer.add_sliding_window(context)  # mlx-lm has none; without this, llama.cpp has one of 4096
    elif writer.arch == "gemma3":
        writer.add_sliding_window(args.sliding_window)
        writer.add_sliding_window_pattern(args.sliding_window_pattern)
        writer.add_rope_freq_base_swa(float(args.rope_local_base_freq))
    elif writer.arch == "phi3":
        writer.add_sliding_window(0)  # mlx-lm has none
        writer.add_rope_scaling_orig_ctx_len(args.original_max_position_embeddings)
    return _write_rotation(writer, module)


def _write_rotation(writer: gguf.GGUFWriter, module: Any) -> dict[str, np.ndarray]:
    """Write the scaling of rotary positions; returns and raises like ``write_shape``."""
    args, rope = module.args, module.layers[0].self_attn.rope
    scaling = getattr(args, "rope_scaling", None) or {}
    rotation = str(scaling.get("type") or scaling.get("rope_type") or "default")
    windows = writer.arch == "llama" and "sliding_attention" in (getattr(args, "layer_types", None) or ())
    if windows or rotation not in ("default", "linear", *ROTATIONS.get(writer.arch, ())):
        what = "some of its blocks see only a sliding window" if windows else f"its rotary scaling is {rotation}"
        raise ModelError(f"llama.cpp would compute this model differently than in training: {what}.", do=KEEP_MLX)
    if rotation == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
    elif rotation == "llama3":
        plain = float(args.rope_theta) ** (mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims)
        return {"rope_freqs.weight": np.array(rope._freqs / plain, dtype=np.float32)}
    elif rotation in LONG:  # mlx-lm uses the long factors for texts of any length, also in training
        writer.add_rope_scaling_attn_factors(float(rope._scale))
        factors = np.array(scaling["long_factor"], dtype=np.float32)
        return {"rope_factors_long.weight": factors, "rope_factors_short.weight": factors}
    return {}


@dataclass(frozen=True)
class GgufPart:
    """A weight of the model, and how the file stores it."""

    name: str  # in the file
    path: str  # of its layer in the module
    kind: str  # weight, or bias
    shape: tuple[int, ...]  # (outputs, inputs), or (width,)
    heads: int  # whose rows are reordered; 0: none
    added: float  # to every number in the file

    def places(self) -> np.ndarray:
        """For each of mlx-lm's rows, its place in the file; shape (rows,)."""
        rows = np.arange(self.shape[0])
        return np.argsort(rows.reshape(self.heads, 2, -1).swapaxes(1, 2).ravel()) if self.heads else rows

    def stored_as(self, kind: Kind) -> Kind:
        """The weight's type in a file of ``kind``: F32 for vectors, Q8_0 for a name in AT_THE_ENDS if it is Q4_0."""
        if len(self.shape) == 1:
            return Kind.F32
        return Kind.Q8_0 if kind == Kind.Q4_0 and self.name in AT_THE_ENDS else kind

    def bytes_as(self, kind: Kind) -> int:
        """The weight's size in a file of ``kind``, in bytes."""
        block, size = gguf.GGML_QUANT_SIZES[self.stored_as(kind)]
        return math.prod(self.shape) // block * size


def parts_of(module: Any, architecture: str) -> list[GgufPart]:
    """Every weight of the model, in the order of writing; raises ModelError if llama.cpp has no name for it."""
    inner = text_model(module)
    prefix, args = "" if inner is module else "language_model.", inner.args
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], args.num_hidden_layers)
    layers = dict(inner.named_modules())
    # llama.cpp rotates neighbouring numbers of q and k in Llama, mlx-lm the halves of a head
    turned = {"attn_q": args.num_attention_heads, "attn_k": args.num_key_value_heads}
    parts, arrays = list[GgufPart](), dict[str, mx.array](tree_flatten(inner.parameters()))
    for array_name, value in arrays.items():
        path, _, kind = array_name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        name = names.get_name(array_name, (".weight", ".bias"))
        if name is None:
            what = f"llama.cpp has no place for a weight of this model: {array_name}."
            raise ModelError(what, expected=f"the weights of {architecture}", do=KEEP_MLX)
        shape = tuple(value.shape) if value.ndim == 1 else (value.shape[0], inputs_of(layers[path]))
        heads = turned.get(name.split(".")[-2], 0) if architecture == "llama" else 0
        is_gemma = architecture.startswith("gemma")  # mlx-lm's norms multiply by 1 + weight
        added = 1.0 if is_gemma and name.endswith("norm.weight") else 0.0
        parts.append(GgufPart(name, prefix + path, kind, shape, heads, added))
    return parts


def taken(part: GgufPart, module: Any, changes: Changes, kind: Kind) -> np.ndarray:
    """Encode a weight, with the adapter merged in, a few rows at a time; returns (rows, bytes of a row) uint8.

    The weight is removed from ``module``, which frees its memory.
    """
    layer, stored, places = dict(module.named_modules())[part.path], part.stored_as(kind), part.places()
    data = np.empty((part.shape[0], part.bytes_as(kind) // part.shape[0]), dtype=np.uint8)
    for rows in slices_of(part.shape[0], math.prod(part.shape[1:])):
        if len(part.shape) == 1:
            weight = changes.values.get(f"{part.path}.{part.kind}", layer[part.kind])[rows].astype(mx.float32)
        else:
            weight = changes.merged(part.path, dequantized(layer, rows), rows)
        values = np.array(weight).reshape(rows.stop - rows.start, -1) + np.float32(part.added)
        with np.errstate(over="ignore"):  # the measured loss is then not a number
            quantized = gguf.quants.quantize(values, stored)
        data[places[rows]] = np.ascontiguousarray(quantized).view(np.uint8).reshape(len(values), -1)
    for name in ("weight", "scales", "biases") if part.kind == "weight" else ("bias",):
        layer.pop(name, None)
    return data


def arrays_in(file: Path, parts: Iterable[GgufPart]) -> Iterator[tuple[str, mx.array]]:
    """Read a file's weights under their names in mlx-lm; quantized weights get 8 bits."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for part in parts:
        tensor = tensors[part.name]
        data, kind = np.asarray(tensor.data).reshape(part.shape[0], -1)[part.places()], tensor.tensor_type
        if kind == Kind.BF16:
            yield f"{part.path}.{part.kind}", mx.array(data.view(np.uint16)).view(mx.bfloat16).reshape(part.shape)
        elif kind in PLAIN:
            yield f"{part.path}.{part.kind}", mx.array((data - part.added).astype(data.dtype).reshape(part.shape))
        else:
            for name, value in zip(("weight", "scales", "biases"), _in_8_bits(data, kind), strict=True):
                yield f"{part.path}.{name}", value


def _in_8_bits(data: np.ndarray, kind: Kind) -> tuple[mx.array, ...]:
    """Convert quantized rows to mlx's 8 bits: q8_0 exactly, fewer bits with a rounding much finer than their own."""
    data = np.ascontiguousarray(data)
    if kind != Kind.Q8_0:
        return tuple(mx.quantize(mx.array(gguf.quants.dequantize(data, kind)), BLOCK, READ_BITS))
    blocks = data.reshape(len(data), -1, 2 + BLOCK)  # a float16 scale and signed numbers
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    numbers = np.ascontiguousarray(blocks[..., 2:] ^ 0x80).reshape(len(data), -1).view(np.uint32)  # -128 becomes 0
    return mx.array(numbers), mx.array(scales), mx.array(scales * -128.0)

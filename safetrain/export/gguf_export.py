"""Writes a tuned model for llama.cpp: base and adapter as they were trained on, or merged into one file and measured.

The settings that llama.cpp needs are in its code: src/models/FAMILY.cpp and conversion/FAMILY.py. Weights are written
and read one at a time.
"""

import gc
import itertools
import json
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind

from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.formatting import size_text
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import fingerprint, lora_number, read_prompt_format, require_base
from safetrain.core.records.evaluation import GGUF_ADAPTER, ExportReport
from safetrain.core.storage.files import (
    full_disk_named,
    json_object,
    require_new,
    require_room,
    write_atomic,
    write_record,
    write_text,
)
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.engine.backend import set_limits
from safetrain.engine.model import BaseModel, dequantize_to_answer
from safetrain.engine.upstream.adaptation import adapt
from safetrain.engine.upstream.family import text_part
from safetrain.engine.upstream.loading import errors_told, load, ready_to_compute, rebuilt
from safetrain.export.comparison import ExportComparison, ExportJob, require_memory
from safetrain.export.fuse import Changes, open_to_merge
from safetrain.export.gguf_text import stop_tokens, write_chat, write_vocabulary
from safetrain.export.gguf_weights import (
    KEEP_MLX,
    KINDS,
    PLAIN,
    REPACKED,
    GgufPart,
    adapter_pairs,
    arrays_in,
    encoded,
    exact_kind,
    parts_of,
    rounds,
    text_model,
)

FAMILIES = {  # llama.cpp's architectures by model_type in config.json
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3",
    "gemma3_text": "gemma3", "phi3": "phi3",
}  # fmt: skip
LONG = ("longrope", "su")
ROTATIONS = {"llama": ("llama3",), "phi3": LONG}  # rotary scalings, besides default and linear
DEFAULT_CONTEXT = 8192  # for gemma2, whose settings in mlx-lm have none
STRIPPING = "phi-3"  # if it is in a model's name, llama.cpp drops white space after special tokens

# Types of an export of base and adapter
EXACT, ROUNDED = "exact", "rounded to 16 bits where GGUF has no smaller type"
FLOAT_BYTES, READ_BYTES = 2, 1.25  # of a weight that is read back: in 16 bits; in 8 bits with scales and biases
LEAST_CONTEXT = 4096  # tokens that Ollama makes room for, if the model can read as many
QUANTIZER = "llama-quantize"  # llama.cpp's program, for types that are not in KINDS
NAMED = 3  # matrices in a line
LAST_WORDS = 400  # characters of its output, if it fails
DO_ROOM = "free some space, choose a folder on another disk, or write one file of fewer bits: --type q4_0"
Begun = tuple[gguf.GGUFWriter, list[GgufPart], dict[str, np.ndarray]]  # metadata, weights, and tensors before them
Info = tuple[str, tuple[int, ...], int, Kind]  # a tensor's name, shape and bytes in the file, and its type


def report_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")


def adapter_of(out: Path) -> Path:
    return out.with_name(f"{out.stem}{GGUF_ADAPTER}")


def modelfile_of(out: Path) -> Path:
    return out.with_name(f"{out.stem}.Modelfile")


def export_gguf(job: ExportJob, kind: str | None, say: Callable[[str], None]) -> ExportReport:
    """Write ``job.out`` with its report and a Modelfile for Ollama; complete, or nothing.

    ``kind``: None writes the adapter beside the base, which is rounded only where no GGUF type holds it; else the type
    of one file with the adapter merged in, one of KINDS or one that llama-quantize makes. Raises ConfigError,
    ModelError if llama.cpp does not support the model or adapter, or one file loses too much of the improvement,
    DiskFullError, and MachineError if memory is too small to measure it.
    """
    names = [report_of(job.out), modelfile_of(job.out), *([adapter_of(job.out)] if kind is None else []), job.out]
    for path in names:
        require_new(path, "choose another name, or remove it")
    if kind not in (None, *KINDS) and shutil.which(QUANTIZER) is None:
        raise ConfigError(
            f"{kind} needs llama.cpp's {QUANTIZER}, which is not installed.",
            do="install it: brew install llama.cpp (or build github.com/ggml-org/llama.cpp); or choose --type q8_0 or "
            "q4_0, which safetrain writes itself",
        )
    parent = job.out.parent.resolve()
    parent.mkdir(parents=True, exist_ok=True)
    with (
        full_disk_named("The disk is full; nothing was written.", parent, "free some space"),
        tempfile.TemporaryDirectory(dir=parent, prefix=".gguf-") as scratch,
    ):
        path = Path(scratch) / job.out.name
        report = _pair(job, path, say) if kind is None else _merged(job, kind, path, say)
        write_record(report_of(path), report)
        write_text(modelfile_of(path), _modelfile(job, has_adapter=kind is None))
        for name in names:
            write_atomic(name, (path.parent / name.name).replace)
    return report


def _pair(job: ExportJob, path: Path, say: Callable[[str], None]) -> ExportReport:
    """Write the base to ``path`` and the adapter beside it."""
    files = read_model_files(job.base)
    require_base(job.adapter, job.base, files.fingerprint)
    module, _, changes = open_to_merge(job.base, job.adapter)
    begun = _begun(job, module, files)
    pairs = adapter_pairs(changes.arrays, begun[1], job.adapter)
    layers = dict(module.named_modules())
    kinds = [exact_kind(part, layers[part.path]) for part in begun[1]]
    rounded = [part.path for part, kind in zip(begun[1], kinds, strict=True) if rounds(layers[part.path], kind)]
    del module, layers  # with the scales that were read
    mx.clear_cache()
    _write_model(begun, path, kinds, load(job.base)[0], None)
    _write_adapter(begun[0].arch, pairs, lora_number(job.adapter, "scale"), adapter_of(path))
    is_quantized = files.quantization_bits is not None
    _describe(path, list(zip(begun[1], kinds, strict=True)), len(rounded), say, is_quantized=is_quantized)
    form, size = read_prompt_format(job.adapter), sum(each.stat().st_size for each in (path, adapter_of(path)))
    return ExportReport(
        ROUNDED if rounded else EXACT, size, str(job.base), files.fingerprint, fingerprint(job.adapter), 0, 0,
        None, None, None, 1.0, form.stop_ids if form else (),
    )  # fmt: skip


def _describe(
    path: Path, parts: Sequence[tuple[GgufPart, Kind]], rounded: int, say: Callable[[str], None], *, is_quantized: bool
) -> None:
    """Say what is in a base's file and in its adapter's; ``rounded``: number of matrices."""
    matrices = [(part, kind) for part, kind in parts if len(part.shape) > 1]
    counts = Counter(kind.name for _, kind in matrices)
    types = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    same = (
        f"{rounded} of {len(matrices)} matrices rounded to 16 bits" if rounded else "every weight equal to the original"
    )
    sizes = [size_text(each.stat().st_size) for each in (path, adapter_of(path))]
    say(f"{path.name}: {sizes[0]}, the base, {same} ({types})")
    say(f"{adapter_of(path).name}: {sizes[1]}, the adapter in float32, as trained")
    larger = [part.path for part, kind in matrices if kind not in REPACKED]
    if larger and is_quantized:
        more = f" and {len(larger) - NAMED} more" if len(larger) > NAMED else ""
        say(f"No smaller GGUF type holds these matrices: {', '.join(larger[:NAMED])}{more}.")
        say("For a smaller file with a measured loss: add --fused")


def _write_adapter(architecture: str, pairs: Mapping[str, tuple[mx.array, mx.array]], scale: float, path: Path) -> None:
    writer = gguf.GGUFWriter(None, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, scale * len(next(iter(pairs.values()))[0]))
    arrays = {
        f"{name}.lora_{letter}": each for name, pair in pairs.items() for letter, each in zip("ab", pair, strict=True)
    }
    infos = [(name, tuple(each.shape), each.nbytes, Kind.F32) for name, each in arrays.items()]
    _write(writer, path, infos, ([np.array(each)] for each in arrays.values()))


def _begun(job: ExportJob, module: Any, files: ModelFiles) -> Begun:
    """A writer with all metadata, the weights to write, and extra tensors to write before them."""
    architecture = architecture_of(files.model_type, job.base)
    parts, writer = parts_of(module, architecture), gguf.GGUFWriter(None, architecture)
    divisors = write_shape(writer, text_model(module))
    _write_texts(writer, job, text_model(module).args.vocab_size)
    return writer, parts, divisors


def _merged(job: ExportJob, kind: str, path: Path, say: Callable[[str], None]) -> ExportReport:
    """Measure the tuned model, write it to ``path``, and measure what was written."""
    files, stored = read_model_files(job.base), KINDS.get(kind, Kind.F16)
    architecture_of(files.model_type, job.base)
    module, config, changes = open_to_merge(job.base, job.adapter)
    begun = writer, parts, _ = _begun(job, module, files)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{stored.name}"])
    kinds = [part.stored_as(stored) for part in parts]
    weights = sum(part.shape[0] * (part.shape[-1] if len(part.shape) > 1 else 1) for part in parts)
    size = int((FLOAT_BYTES if KINDS.get(kind) in PLAIN else READ_BYTES) * weights)
    do = "close other programs, choose --type q8_0 or fewer bits, or export on a larger machine"
    require_memory(size, "the GGUF file", do)
    comparison = ExportComparison(job, files, say)
    unquantized = path if kind in KINDS else path.with_name(f"f16-{path.name}")
    _write_model(begun, unquantized, kinds, module, changes)
    if unquantized != path:
        _quantize(unquantized, path, kind)
    del module, changes, writer, begun
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


def _write(writer: gguf.GGUFWriter, path: Path, infos: Sequence[Info], data: Iterable[Iterable[np.ndarray]]) -> None:
    """Write a file; ``data`` has the bytes of each tensor of ``infos``, in pieces."""
    disk = sum(size for _, _, size, _ in infos)
    require_room(path.parent, disk, "There is too little disk space for the GGUF file.", DO_ROOM)
    for name, shape, size, kind in infos:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        file: Any = next(iter(writer.fout or ()))
        writer.write_padding(file, file.tell())
        for pieces in data:
            for values in pieces:
                file.write(np.ascontiguousarray(values).data)
            writer.write_padding(file, file.tell())
    finally:
        writer.close()


def _write_model(begun: Begun, path: Path, kinds: Sequence[Kind], module: Any, changes: Changes | None) -> None:
    """Write a model's weights. Each is removed from ``module`` after it is written, which frees its memory."""
    writer, parts, divisors = begun
    layers = dict(module.named_modules())
    infos: list[Info] = [(name, values.shape, values.nbytes, Kind.F32) for name, values in divisors.items()]
    infos += [(part.name, part.shape, part.bytes_as(kind), kind) for part, kind in zip(parts, kinds, strict=True)]

    def pieces(part: GgufPart, kind: Kind) -> Iterator[np.ndarray]:
        for rows in encoded(part, layers[part.path], changes, kind):
            yield rows
            mx.clear_cache()
        for name in ("weight", "scales", "biases") if part.kind == "weight" else ("bias",):
            layers[part.path].pop(name, None)

    weights = (pieces(part, kind) for part, kind in zip(parts, kinds, strict=True))
    _write(writer, path, infos, itertools.chain(([values] for values in divisors.values()), weights))


def _quantize(source: Path, target: Path, kind: str) -> None:
    """Run llama-quantize; raises ModelError with the end of its output if it fails."""
    command = [QUANTIZER, str(source), str(target), kind.upper()]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode != 0:
        words = " ".join((process.stderr or process.stdout).split())[-LAST_WORDS:]
        do = "choose --type q8_0 or q4_0, which safetrain writes itself"
        raise ModelError(f"{QUANTIZER} cannot make {kind}.", got=words or f"exit code {process.returncode}", do=do)


def _modelfile(job: ExportJob, *, has_adapter: bool) -> str:
    """What ``ollama create`` reads: the files, the texts that end an answer, and room for the context."""
    tokenizer = ChatTokenizer(job.base)
    stops = stop_tokens(tokenizer, read_prompt_format(job.adapter))
    wanted = max(LEAST_CONTEXT, int(job.rows.lengths.max()))
    context = min(wanted, text_part(json_object(job.base / "config.json")).get("max_position_embeddings") or wanted)
    lines = [f"FROM ./{job.out.name}", f"ADAPTER ./{adapter_of(job.out).name}" if has_adapter else ""]
    lines += [f"PARAMETER stop {json.dumps(tokenizer.token_of(stop), ensure_ascii=False)}" for stop in stops]
    return "\n".join(filter(None, [*lines, f"PARAMETER num_ctx {context}"])) + "\n"


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

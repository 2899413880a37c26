"""Writes a tuned model as a GGUF file, and reads and measures it before it gets its final name."""

import gc
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import read_prompt_format, require_base
from safetrain.core.records.fusing import ExportReport
from safetrain.core.storage.files import full_disk_named, require_new, require_room, write_atomic, write_record
from safetrain.engine.backend import set_limits
from safetrain.engine.exchange.gguf_model import (
    FILE_TYPES,
    KINDS,
    PLAIN,
    GgufPart,
    arrays_in,
    family_of,
    parts_of,
    taken,
    text_model,
    write_shape,
)
from safetrain.engine.exchange.gguf_text import strips_spaces, vocabulary_of, write_chat, write_vocabulary
from safetrain.engine.fuse import Folds, open_to_fold
from safetrain.engine.model import BaseModel, dequantize_to_answer
from safetrain.engine.tuned import ExportComparison, ExportJob, require_memory
from safetrain.engine.upstream.adaptation import adapt
from safetrain.engine.upstream.loading import errors_told, ready_to_compute, rebuilt

QUANTIZER, QUANTIZED_FROM = "llama-quantize", "f16"  # llama.cpp's program, for types that are not in KINDS
LAST_WORDS = 400  # characters of its output, if it fails
STRIPPING = "phi-3"  # in a model's name: llama.cpp drops white space after its special tokens
FLOAT_BYTES, READ_BYTES = 2, 1.25  # of a weight that is read: in 16 bits; in 8 bits with scales and biases


def report_of(out: Path) -> Path:
    """Path of the report on a GGUF file."""
    return out.with_name(f"{out.name}.json")


def export_gguf(job: ExportJob, kind: str, say: Callable[[str], None]) -> ExportReport:
    """Write ``job.out`` and its report, both or none; ``kind`` is one of KINDS, or one that llama-quantize makes.

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

    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"), ExitStack() as undo:
        undo.callback(report_of(job.out).unlink, missing_ok=True)
        write_atomic(job.out, write)
        undo.pop_all()
    return reports[0]


def _exported(job: ExportJob, kind: str, path: Path, say: Callable[[str], None]) -> ExportReport:
    """Measure the tuned model, write it to ``path``, and measure what was written."""
    files, stored = read_model_files(job.base), KINDS.get(kind, KINDS[QUANTIZED_FROM])
    family = family_of(files.model_type, str(job.base))
    require_base(job.adapter, job.base, files.fingerprint)
    set_limits(job.mlx_limit_bytes)
    module, config, folds = open_to_fold(job.base, job.adapter)
    parts, writer = parts_of(module, family), gguf.GGUFWriter(None, family.architecture)
    writer.add_file_type(FILE_TYPES[stored])
    divisors = write_shape(writer, family, text_model(module))
    _write_texts(writer, job, text_model(module))
    size = _require_room(path, parts, stored, kind)
    comparison = ExportComparison(job, files, say)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".gguf-") as scratch:
        unquantized = path if kind in KINDS else Path(scratch) / path.name
        _write(writer, unquantized, divisors, parts, module, folds, stored)
        if unquantized != path:
            _quantize(unquantized, path, kind)
    del module, folds, writer
    gc.collect()
    set_limits(job.mlx_limit_bytes + max(0, size - files.static_bytes))
    with errors_told("open what was written", str(path)):
        module = rebuilt(config, dict(arrays_in(path, parts)))
        dequantize = dequantize_to_answer(files)
        module = ready_to_compute(module, dequantize=dequantize, compute_dtype=job.compute_dtype)
    model, name = BaseModel(module, frozenset(), *adapt(module)), f"{job.out.name} ({kind})"
    report, why = comparison.of(model, name, kind, path.stat().st_size)
    if why:
        raise ModelError(
            f"This GGUF file does not keep the improvement: in {kind}, it {why}.",
            where=str(job.out),
            expected=f"at least {100 * (1 - job.may_lose):g} % kept",
            got=f"{100 * report.kept:.1f} %",
            do="choose more bits (--type q8_0, bf16, f16), or write it anyway with --may-lose 100",
        )
    return report


def _write_texts(writer: gguf.GGUFWriter, job: ExportJob, module: Any) -> None:
    """Write the name, the tokenizer and the chat settings into the metadata."""
    tokenizer, size = ChatTokenizer(job.base), module.args.vocab_size
    chats, where = bool(tokenizer.template), str(job.base)
    vocabulary = vocabulary_of(tokenizer.definition, size, chats=chats, where=where)
    strips = writer.arch == "phi3" and strips_spaces(tokenizer.definition)
    writer.add_type("model")
    writer.add_name(f"{job.out.stem} ({STRIPPING})" if strips else job.out.stem)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_vocabulary(writer, vocabulary)
    write_chat(writer, tokenizer, read_prompt_format(job.adapter), size, job.base)


def _require_room(path: Path, parts: Sequence[GgufPart], stored: Kind, kind: str) -> int:
    """Return the bytes of the file's weights in memory; raises DiskFullError and MachineError if they do not fit."""
    do = "free some space, choose a folder on another disk, or fewer bits with --type"
    disk = sum(part.bytes_as(stored) for part in parts)
    require_room(path.parent, disk, "There is too little disk space for the GGUF file.", do)
    each = FLOAT_BYTES if KINDS.get(kind) in PLAIN else READ_BYTES
    size = int(each * sum(math.prod(part.shape) for part in parts))
    do = "close other programs, choose --type q8_0 or fewer bits, or export on a larger machine"
    require_memory(size, "the GGUF file", do)
    return size


def _write(
    writer: gguf.GGUFWriter,
    path: Path,
    divisors: dict[str, np.ndarray],
    parts: Sequence[GgufPart],
    module: Any,
    folds: Folds,
    kind: Kind,
) -> None:
    for name, values in divisors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for part in parts:
        size = part.bytes_as(kind)
        writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), size, part.stored_as(kind))
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in divisors.values():
            writer.write_tensor_data(values)
        for part in parts:
            writer.write_tensor_data(taken(part, module, folds, kind))
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

"""Writes a tuned model as a GGUF file, and reads and measures it before it gets its final name."""

import gc
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import ConfigError, MachineError, ModelError
from safetrain.core.formatting import size_text
from safetrain.core.memory.budget import host_room_bytes, read_memory
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import fingerprint, read_prompt_format, require_base
from safetrain.core.records.fusing import GgufReport, Likeness, describe, kept_share, refusal
from safetrain.core.storage.files import (
    full_disk_named,
    require_new,
    require_room,
    write_atomic,
    write_record,
    write_text,
)
from safetrain.engine.backend import set_limits
from safetrain.engine.exchange.gguf_model import (
    FILE_TYPES,
    KINDS,
    arrays_in,
    family_of,
    parts_of,
    taken,
    text_model,
    write_shape,
)
from safetrain.engine.exchange.gguf_text import Vocabulary, chat_of, modelfile, vocabulary_of, write_texts
from safetrain.engine.folding import open_to_fold
from safetrain.engine.model import BaseModel, dequantize_to_answer
from safetrain.engine.tuned import ExportJob, TunedModel, measure_tuned
from safetrain.engine.upstream.adaptation import adapt
from safetrain.engine.upstream.loading import errors_told, ready_to_compute, rebuilt

QUANTIZER, QUANTIZED_FROM = "llama-quantize", "f16"  # llama.cpp's program, for types that are not in KINDS
LAST_WORDS = 400  # characters of its output, if it fails
STRIPPING = "phi-3"  # in a model's name: llama.cpp drops white space after its special tokens


@dataclass(frozen=True)
class GgufJob(ExportJob):
    """What to write, and how much of the improvement may be lost."""

    kind: str = "q8_0"  # of KINDS, or one that llama-quantize makes
    may_lose: float = 0.02  # share of the improvement


def report_of(out: Path) -> Path:
    """Path of the report on a GGUF file."""
    return out.with_name(f"{out.name}.json")


def modelfile_of(out: Path) -> Path:
    """Path of Ollama's Modelfile for a GGUF file."""
    return out.with_name(f"{out.stem}.Modelfile")


def export_gguf(job: GgufJob, say: Callable[[str], None]) -> GgufReport:
    """Write ``job.out``, its report and its Modelfile, all or none.

    Raises ConfigError, ModelError if llama.cpp does not support the model or the file loses too much of the
    improvement, DiskFullError, and MachineError if memory is too small to measure the file.
    """
    beside = (report_of(job.out), modelfile_of(job.out))
    for path in (job.out, *beside):
        require_new(path, "choose another name, or remove it")
    if job.kind not in KINDS and shutil.which(QUANTIZER) is None:
        raise ConfigError(
            f"{job.kind} needs llama.cpp's {QUANTIZER}, which is not installed.",
            do="install it: brew install llama.cpp (or build github.com/ggml-org/llama.cpp); or choose --type q8_0 or "
            "q4_0, which safetrain writes itself",
        )
    files = read_model_files(job.base)
    family_of(files.model_type, str(job.base))
    if job.adapter is not None:
        require_base(job.adapter, job.base, files.fingerprint)
    parent, reports = job.out.parent.resolve(), list[GgufReport]()
    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"), ExitStack() as undo:
        for path in beside:
            undo.callback(path.unlink, missing_ok=True)
        write_atomic(job.out, lambda path: reports.append(_GgufExport(job, files, say).to(path)), over=False)
        undo.pop_all()
    return reports[0]


class _GgufExport:
    """Export of one file. Creating it reports what llama.cpp does differently, or raises; it writes nothing."""

    def __init__(self, job: GgufJob, files: ModelFiles, say: Callable[[str], None]) -> None:
        self._job, self._files, self._say = job, files, say
        self._family = family_of(files.model_type, str(job.base))
        self._kind = KINDS.get(job.kind, KINDS[QUANTIZED_FROM])
        self._format = read_prompt_format(job.adapter or job.base)  # fuse writes it next to its model
        self._tokenizer = tokenizer = ChatTokenizer(job.base)
        self._chat = chat_of(tokenizer, self._format, job.base)
        set_limits(job.mlx_limit_bytes)
        self._module, self._config, self._folds = open_to_fold(job.base, job.adapter)
        inner = text_model(self._module)
        self._vocabulary = vocabulary_of(
            tokenizer.definition, inner.args.vocab_size, chats=bool(tokenizer.template), where=str(job.base)
        )
        for note in self._vocabulary.notes:
            say(f"note: {note}")
        self._parts = parts_of(self._module, self._family)
        self._writer = writer = gguf.GGUFWriter(None, self._family.architecture)
        writer.add_type("model")
        writer.add_name(_name(job.out.stem, self._family.architecture, self._vocabulary))
        writer.add_file_type(FILE_TYPES[self._kind])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        self._divisors = write_shape(writer, self._family, inner)
        write_texts(writer, self._vocabulary, self._chat, tokenizer)

    def to(self, path: Path) -> GgufReport:
        """Measure the tuned model, write it to ``path``, and measure what was written."""
        job = self._job
        is_measured = self._require_room(path)
        tuned = measure_tuned(job, self._files)
        base = job.measure_base(tuned, self._files, self._say) if job.adapter is not None else None
        if base is None:
            self._say(job.describe_rows(tuned))
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".gguf-") as scratch:
            unquantized = path if job.kind in KINDS else Path(scratch) / path.name
            self._write(unquantized)
            if unquantized != path:
                _quantize(unquantized, path, job.kind)
        del self._module, self._folds, self._writer
        gc.collect()
        arrays = arrays_in(path, self._parts, self._vocabulary.tokens)
        likeness = share = None
        if is_measured:
            likeness, share = self._measure(arrays, path, tuned, base)
        else:
            deque(arrays, maxlen=0)  # reads each once and keeps none
        adapter, rows = fingerprint(job.adapter) if job.adapter is not None else "", tuned.rows
        report = GgufReport(
            job.out.name, job.kind, path.stat().st_size, self._family.architecture,
            f"{self._vocabulary.model}, {self._vocabulary.pre}", str(job.base), self._files.fingerprint, adapter,
            len(rows), int(rows.label_counts.sum()), base, tuned.own, likeness, share, self._vocabulary.notes,
        )  # fmt: skip
        write_text(modelfile_of(job.out), modelfile(job.out, self._chat, self._tokenizer, self._format))
        write_record(report_of(job.out), report)
        return report

    def _require_room(self, path: Path) -> bool:
        """Whether the file fits into memory; raises DiskFullError, and MachineError if it must fit but does not."""
        do = "free some space, choose a folder on another disk, or fewer bits with --type"
        disk = sum(part.bytes_as(self._kind) for part in self._parts)
        require_room(path.parent, disk, "There is too little disk space for the GGUF file.", do)
        size = sum(part.bytes_as(self._kind, opened=True) for part in self._parts)
        room = host_room_bytes(read_memory())
        if size > room and self._job.may_lose < 1:
            raise MachineError(
                "There is too little memory to measure the GGUF file; nothing was written.",
                expected=size_text(size),
                got=f"{size_text(room)} available",
                do="close other programs, choose fewer bits with --type, or write it unmeasured with --may-lose 100",
            )
        if size > room:
            self._say(f"note: not measured: the file needs {size_text(size)} of memory, {size_text(room)} is free")
        else:
            set_limits(self._job.mlx_limit_bytes + max(0, size - self._files.static_bytes))
        return size <= room

    def _write(self, path: Path) -> None:
        writer, kind = self._writer, self._kind
        for name, values in self._divisors.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        for part in self._parts:
            stored, size = part.stored_as(kind), part.bytes_as(kind)
            writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), size, stored)
        try:
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for values in self._divisors.values():
                writer.write_tensor_data(values)
            for part in self._parts:
                writer.write_tensor_data(taken(part, self._module, self._folds, kind))
        finally:
            writer.close()

    def _measure(
        self, arrays: Iterator[tuple[str, mx.array]], path: Path, tuned: TunedModel, base: Likeness | None
    ) -> tuple[Likeness, float | None]:
        """Compare the file with the tuned model, and return the share kept; raises ModelError if it is too small."""
        job, rows = self._job, len(tuned.rows)
        with errors_told("open what was written", str(path)):
            module = ready_to_compute(
                rebuilt(self._config, dict(arrays)),
                dequantize=dequantize_to_answer(self._files),
                compute_dtype=job.compute_dtype,
            )
        likeness = tuned.likeness_of(BaseModel(module, frozenset(), adapt(module)))
        share = kept_share(base, tuned.own, likeness) if base is not None else None
        why = refusal(1.0 if share is None else share, likeness, job.may_lose)
        name, size = f"{job.out.name} ({job.kind})", path.stat().st_size
        if share is None:
            same = f"{round(likeness.same_answers * rows)} of {rows} answers are the same"
            self._say(f"{name}: {size_text(size)}, loss {likeness.loss:.4f} ({tuned.own.loss:.4f} before), {same}")
        else:
            self._say(describe(name, size, share, likeness, rows, why or "passes"))
        self._say(f"divergence from the tuned model: {likeness.divergence:.1e} nats per label")
        if why:
            raise ModelError(
                f"This GGUF file does not keep the improvement: in {job.kind}, it {why}.",
                where=str(job.out),
                expected="" if share is None else f"at least {100 * (1 - job.may_lose):g} % kept",
                got="" if share is None else f"{100 * share:.1f} %",
                do="choose more bits (--type q8_0, bf16, f16), or write it anyway with --may-lose 100",
            )
        return likeness, share


def _quantize(source: Path, target: Path, kind: str) -> None:
    """Run llama-quantize; raises ModelError with the end of its output if it fails."""
    command = [QUANTIZER, str(source), str(target), kind.upper()]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode != 0:
        words = " ".join((process.stderr or process.stdout).split())[-LAST_WORDS:]
        do = "choose --type q8_0 or q4_0, which safetrain writes itself"
        raise ModelError(f"{QUANTIZER} cannot make {kind}.", got=words or f"exit code {process.returncode}", do=do)


def _name(name: str, architecture: str, vocabulary: Vocabulary) -> str:
    """The model's name, from which llama.cpp also decides how to treat white space."""
    if architecture == "phi3" and vocabulary.strips_after:
        return name if STRIPPING in name.lower() else f"{name} ({STRIPPING})"
    return name.lower().replace("phi-3", "phi 3").replace("phi3", "phi 3") if "phi" in name.lower() else name

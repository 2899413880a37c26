"""Writes a tuned model as a GGUF file, reads it again, and measures what it keeps, before it gets its name."""

import gc
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import ConfigError, MachineError, ModelError
from safetrain.core.formatting import size_text
from safetrain.core.memory.budget import host_room_bytes, read_memory
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import adapter_scale, fingerprint, read_prompt_format, require_base
from safetrain.core.records.exporting import GgufReport
from safetrain.core.records.fusing import Likeness, describe, kept_share, refusal
from safetrain.core.storage.files import (
    full_disk_named,
    require_new,
    require_room,
    write_atomic,
    write_record,
    write_text,
)
from safetrain.engine.adapter_folder import adapter_arrays
from safetrain.engine.backend import set_limits
from safetrain.engine.exchange.gguf_chat import chat_of, modelfile, write_chat
from safetrain.engine.exchange.gguf_families import Family, GgufPart, family_of, parts_of, text_model
from safetrain.engine.exchange.gguf_shape import require_known, rope_tensors, write_shape
from safetrain.engine.exchange.gguf_tensors import (
    FILE_TYPES,
    KINDS,
    arrays_in,
    bytes_of,
    forget,
    kind_of,
    opened_bytes,
    require_whole,
    written,
)
from safetrain.engine.exchange.gguf_vocabulary import Vocabulary, vocabulary_of, write_vocabulary
from safetrain.engine.folding import Folds, folds_of
from safetrain.engine.model import BaseModel, dequantize_to_answer
from safetrain.engine.tuned import ExportJob, TunedModel, measure_tuned
from safetrain.engine.upstream.adaptation import adapt
from safetrain.engine.upstream.loading import errors_told, load, ready_to_compute, rebuilt

QUANTIZER, QUANTIZED_FROM = "llama-quantize", "f16"  # llama.cpp's program, for types that KINDS has not
LAST_WORDS = 400  # of it, where it fails
STRIPPING = "phi-3"  # llama.cpp drops white space behind special tokens of a model whose name has this


@dataclass(frozen=True)
class GgufJob(ExportJob):
    """What to write, and how much of what was learnt may be lost."""

    kind: str = "q8_0"  # of KINDS, or one that llama-quantize makes
    may_lose: float = 0.02  # share of what was learnt


def report_of(out: Path) -> Path:
    """Where the figures are."""
    return out.with_name(f"{out.name}.json")


def modelfile_of(out: Path) -> Path:
    """For Ollama."""
    return out.with_name(f"{out.stem}.Modelfile")


def export_gguf(job: GgufJob, say: Callable[[str], None]) -> GgufReport:
    """Write ``job.out``, its report and its Modelfile, all or none.

    Raises ConfigError, ModelError where llama.cpp has no such model or the file does not keep what was learnt,
    DiskFullError, and MachineError where the file does not fit into memory to be measured.
    """
    beside = (report_of(job.out), modelfile_of(job.out))
    for path in (job.out, *beside):
        require_new(path, "choose another name, or remove it")
    if job.kind not in KINDS and shutil.which(QUANTIZER) is None:
        raise ConfigError(
            f"{job.kind} is made by llama.cpp's {QUANTIZER}, which is not installed.",
            do="install it: brew install llama.cpp (or build github.com/ggml-org/llama.cpp); or choose --type q8_0 or "
            "q4_0, which safetrain writes itself",
        )
    files = read_model_files(job.base)
    family = family_of(files.model_type, str(job.base))
    if job.adapter is not None:
        require_base(job.adapter, job.base, files.fingerprint)
    parent = job.out.parent.resolve()
    reports: list[GgufReport] = []
    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"), ExitStack() as undo:
        for path in beside:
            undo.callback(path.unlink, missing_ok=True)
        write_atomic(job.out, lambda path: reports.append(_GgufExport(job, files, family, say).to(path)), over=False)
        undo.pop_all()
    return reports[0]


class _GgufExport:
    """One file."""

    def __init__(self, job: GgufJob, files: ModelFiles, family: Family, say: Callable[[str], None]) -> None:
        self._job, self._files, self._family, self._say = job, files, family, say
        self._kind = KINDS.get(job.kind, KINDS[QUANTIZED_FROM])
        self._format = read_prompt_format(job.adapter or job.base)  # fuse writes it beside its model
        self._tokenizer = ChatTokenizer(job.base)
        self._chat = chat_of(self._tokenizer, self._format, job.base)

    def to(self, path: Path) -> GgufReport:
        """Measure the tuned model, write it to ``path``, and measure what was written."""
        job = self._job
        set_limits(job.mlx_limit_bytes)
        module, config, folds = self._read()
        args = text_model(module)[0].args
        require_known(self._family, args)
        vocabulary = self._vocabulary(args.vocab_size)
        parts = parts_of(module, self._family)
        is_measured = self._require_room(path, parts)
        tuned = measure_tuned(job, self._files)
        base = job.measure_base(tuned, self._files, self._say) if job.adapter is not None else None
        if base is None:
            self._say(job.describe_rows(tuned))
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".gguf-") as scratch:
            unquantized = path if job.kind in KINDS else Path(scratch) / path.name
            self._write(unquantized, module, folds, parts, vocabulary)
            if unquantized != path:
                _quantize(unquantized, path, job.kind)
        del module, folds
        gc.collect()
        require_whole(path, parts, vocabulary.tokens)
        likeness, share = self._measure(path, config, parts, tuned, base) if is_measured else (None, None)
        adapter, rows = fingerprint(job.adapter) if job.adapter is not None else "", tuned.rows
        report = GgufReport(
            job.out.name, job.kind, path.stat().st_size, self._family.architecture,
            f"{vocabulary.model}, {vocabulary.pre}", str(job.base), self._files.fingerprint, adapter, len(rows),
            int(rows.label_counts.sum()), base, tuned.own, likeness, share, vocabulary.notes,
        )  # fmt: skip
        write_text(modelfile_of(job.out), modelfile(job.out, self._chat, self._tokenizer, self._format))
        write_record(report_of(job.out), report)
        return report

    def _read(self) -> tuple[Any, dict[str, Any], Folds]:
        """The base, its configuration and what the adapter does to it; weights stay unread on the disk."""
        with errors_told("open the model", str(self._job.base)):
            module, config = load(self._job.base)
        adapter = self._job.adapter
        if adapter is None:
            return module, config, Folds({}, {})
        return module, config, folds_of(module, adapter_arrays(adapter), adapter_scale(adapter))

    def _vocabulary(self, size: int) -> Vocabulary:
        chats = bool(self._tokenizer.template)
        vocabulary = vocabulary_of(self._tokenizer.definition, size, chats=chats, where=str(self._job.base))
        for note in vocabulary.notes:
            self._say(f"note: {note}")
        return vocabulary

    def _require_room(self, path: Path, parts: list[GgufPart]) -> bool:
        """Whether memory holds the file; raises DiskFullError, and MachineError where it must and does not."""
        do = "free some space, choose a folder on another disk, or fewer bits with --type"
        disk = sum(bytes_of(part, self._kind) for part in parts)
        require_room(path.parent, disk, "There is too little room for the GGUF file.", do)
        size, room = sum(opened_bytes(part, self._kind) for part in parts), host_room_bytes(read_memory())
        if size > room and self._job.may_lose < 1:
            raise MachineError(
                "The GGUF file would not fit into memory to be measured; nothing was written.",
                expected=size_text(size),
                got=f"{size_text(room)} available",
                do="close other programs, choose fewer bits with --type, or write it unmeasured with --may-lose 100",
            )
        if size > room:
            self._say(f"note: not measured: the file needs {size_text(size)} of memory, {size_text(room)} is free")
        else:
            set_limits(self._job.mlx_limit_bytes + max(0, size - self._files.static_bytes))
        return size <= room

    def _write(self, path: Path, module: Any, folds: Folds, parts: list[GgufPart], vocabulary: Vocabulary) -> None:
        kind, inner = self._kind, text_model(module)[0]
        writer = gguf.GGUFWriter(path, self._family.architecture)
        try:
            writer.add_type("model")
            writer.add_name(_name(self._job, self._family, vocabulary))
            writer.add_file_type(FILE_TYPES[kind])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            write_shape(writer, self._family, inner)
            write_vocabulary(writer, vocabulary)
            write_chat(writer, self._chat, self._tokenizer, vocabulary)
            extra = rope_tensors(inner)
            for name, values in extra.items():
                writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
            for part in parts:
                stored = kind_of(part, kind)
                writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), bytes_of(part, kind), stored)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for values in extra.values():
                writer.write_tensor_data(values)
            for part in parts:
                writer.write_tensor_data(written(part, module, folds, kind))
                forget(part, module, folds)
        finally:
            writer.close()

    def _measure(
        self, path: Path, config: dict[str, Any], parts: list[GgufPart], tuned: TunedModel, base: Likeness | None
    ) -> tuple[Likeness, float | None]:
        """What the file's own weights are like, and the share that they keep; raises ModelError where it is small."""
        job, rows = self._job, len(tuned.rows)
        with errors_told("open what was written", str(path)):
            module = ready_to_compute(
                rebuilt(config, arrays_in(path, parts)),
                dequantize=dequantize_to_answer(self._files),
                compute_dtype=job.compute_dtype,
            )
        likeness = tuned.likeness_of(BaseModel(module, frozenset(), adapt(module)))
        share = kept_share(base, tuned.own, likeness) if base is not None else None
        why = refusal(1.0 if share is None else share, likeness, job.may_lose)
        why = why if job.may_lose < 1 or not math.isfinite(likeness.loss) else ""
        name = f"{job.out.name} ({job.kind})"
        size, same = path.stat().st_size, f"{round(likeness.same_answers * rows)} of {rows} answers the same"
        if share is None:
            self._say(f"{name}: {size_text(size)}, loss {likeness.loss:.4f} ({tuned.own.loss:.4f} before), {same}")
        else:
            self._say(describe(name, size, share, likeness, rows, why or "holds"))
        self._say(f"its divergence from the tuned model: {likeness.divergence:.1e} nats per label")
        if why:
            raise ModelError(
                f"This GGUF file does not keep what was learnt: {job.kind}: {why}.",
                where=str(job.out),
                expected="" if share is None else f"at least {100 * (1 - job.may_lose):g} % kept",
                got="" if share is None else f"{100 * share:.1f} %",
                do="choose more bits (--type q8_0, bf16, f16), or take it as it is with --may-lose 100",
            )
        return likeness, share


def _quantize(source: Path, target: Path, kind: str) -> None:
    """By llama-quantize; raises ModelError with its last words where it fails."""
    command = [QUANTIZER, str(source), str(target), kind.upper()]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode != 0:
        words = " ".join((process.stderr or process.stdout).split())[-LAST_WORDS:]
        do = "choose --type q8_0 or q4_0, which safetrain writes itself"
        raise ModelError(f"{QUANTIZER} cannot make {kind}.", got=words or f"exit code {process.returncode}", do=do)


def _name(job: GgufJob, family: Family, vocabulary: Vocabulary) -> str:
    """The model's name, which llama.cpp also takes for a hint."""
    name = job.out.stem
    if family.architecture == "phi3" and vocabulary.strips_behind:
        return name if STRIPPING in name.lower() else f"{name} ({STRIPPING})"
    return name.lower().replace("phi-3", "phi 3").replace("phi3", "phi 3") if "phi" in name.lower() else name

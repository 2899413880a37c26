"""Writes a tuned model as a GGUF file, reads it again, and measures what it keeps, before it gets its name."""

import gc
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import MachineError, ModelError
from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.budget import host_room_bytes, read_memory
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import Taught, adapter_scale, fingerprint, read_taught, require_base
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
from safetrain.engine.exchange.gguf_chat import GgufChat, chat_of, modelfile, write_chat
from safetrain.engine.exchange.gguf_families import Family, GgufPart, family_of, parts_of, text_model
from safetrain.engine.exchange.gguf_llama import ask_llama
from safetrain.engine.exchange.gguf_shape import require_known, rope_tensors, write_shape
from safetrain.engine.exchange.gguf_tensors import (
    FILE_TYPES,
    KINDS,
    arrays_in,
    bytes_of,
    forget,
    kind_of,
    opened_bytes,
    written,
)
from safetrain.engine.exchange.gguf_vocabulary import Vocabulary, vocabulary_of
from safetrain.engine.folding import Folds, folds_of
from safetrain.engine.model import BaseModel, dequantize_to_answer
from safetrain.engine.tuned import ExportJob, measure_tuned
from safetrain.engine.upstream.adaptation import adapt
from safetrain.engine.upstream.loading import errors_told, load, ready_to_compute, rebuilt

LLAMA_TIMES, LLAMA_MORE = 10, 0.01  # it rounds what goes through the model too, mlx-lm in float32 does not
STRIPPING = "phi-3"  # llama.cpp drops white space behind special tokens of a model whose name has this


@dataclass(frozen=True)
class GgufJob(ExportJob):
    """What to write, and how much of what was learnt may be lost."""

    kind: str = "q8_0"
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
        self._taught: Taught | None = read_taught(job.adapter or job.base)  # fuse writes it beside its model
        self._tokenizer = ChatTokenizer(job.base)
        self._chat: GgufChat = chat_of(self._tokenizer, self._taught, job.base)

    def to(self, path: Path) -> GgufReport:
        """Measure the tuned model, write it to ``path``, and measure what was written."""
        set_limits(self._job.mlx_limit_bytes)
        module, config, folds = self._read()
        args = text_model(module)[0].args
        require_known(self._family, args)
        vocabulary = self._vocabulary(args.vocab_size)
        parts = parts_of(module, self._family)
        kind = KINDS[self._job.kind]
        do = "free some space, choose a folder on another disk, or fewer bits with --type"
        size = sum(bytes_of(part, kind) for part in parts)
        require_room(path.parent, size, "There is too little room for the GGUF file.", do)
        opened = self._opened_bytes(sum(opened_bytes(part, kind) for part in parts))
        self._tuned = measure_tuned(self._job, self._files)
        self._base: Likeness | None = None
        if self._job.adapter is not None:
            self._base = self._tuned.measure_base(self._files, self._say)
        else:
            self._say(self._tuned.describe_rows())
        self._write(path, module, folds, parts, vocabulary)
        del module, folds
        gc.collect()
        size = path.stat().st_size
        found = kept = llama = None
        if opened:
            found, kept = self._read_back(path, config, parts, opened)
            llama = ask_llama(
                path, self._tuned.rows, self._tuned.reference, self._tokenizer, self._taught, self._say,
                explains=vocabulary.explains, may_differ=self._job.may_lose >= 1,
            )  # fmt: skip
            if llama is not None:
                self._require_same(llama.likeness.divergence, found.divergence)
        job = self._job
        adapter = fingerprint(job.adapter) if job.adapter is not None else ""
        rows = self._tuned.rows
        report = GgufReport(
            job.out.name, job.kind, size, self._family.architecture, f"{vocabulary.model}, {vocabulary.pre}",
            str(job.base), self._files.fingerprint, adapter, len(rows), int(rows.label_counts.sum()),
            self._base, self._tuned.own, found, kept, llama, vocabulary.notes,
        )  # fmt: skip
        write_text(modelfile_of(job.out), modelfile(job.out, self._chat, self._tokenizer, self._taught))
        write_record(report_of(job.out), report)
        return report

    def _read(self) -> tuple[Any, dict[str, Any], Folds]:
        """The base and what the adapter does to it, both unread on the disk, and the base's configuration."""
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

    def _write(self, path: Path, module: Any, folds: Folds, parts: list[GgufPart], vocabulary: Vocabulary) -> None:
        kind, inner = KINDS[self._job.kind], text_model(module)[0]
        writer = gguf.GGUFWriter(path, self._family.architecture)
        try:
            writer.add_type("model")
            writer.add_name(_name(self._job, self._family, vocabulary))
            writer.add_file_type(FILE_TYPES[kind])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            write_shape(writer, self._family, inner)
            _write_vocabulary(writer, vocabulary)
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

    def _opened_bytes(self, size: int) -> int:
        """``size``, or 0 where the file is not to be opened again; raises MachineError where it must and cannot."""
        room = host_room_bytes(read_memory())
        if size <= room:
            return size
        if self._job.may_lose < 1:
            raise MachineError(
                "The GGUF file would not fit into memory, so nobody could say what it keeps; nothing was written.",
                expected=size_text(size),
                got=f"{size_text(room)} available",
                do="close other programs, choose fewer bits with --type, or write it unmeasured with --may-lose 100",
            )
        fits = f"{size_text(size)} do not fit into the {size_text(room)} of memory that are available"
        self._say(f"note: the file is not opened again, nobody knows what it keeps: {fits}")
        return 0

    def _read_back(
        self, path: Path, config: dict[str, Any], parts: list[GgufPart], opened: int
    ) -> tuple[Likeness, float | None]:
        """What the file's own weights are like, and the share that they keep; raises ModelError where it is small."""
        set_limits(self._job.mlx_limit_bytes + max(0, opened - self._files.static_bytes))
        with errors_told("open what was written", str(path)):
            module = ready_to_compute(
                rebuilt(config, arrays_in(path, parts)),
                dequantize=dequantize_to_answer(self._files),
                compute_dtype=self._job.compute_dtype,
            )
        found = self._tuned.likeness_of(BaseModel(module, frozenset(), adapt(module)))
        kept = kept_share(self._base, self._tuned.own, found) if self._base is not None else None
        why = refusal(1.0 if kept is None else kept, found, self._job.may_lose)
        why = why if self._job.may_lose < 1 or not math.isfinite(found.loss) else ""
        name, rows, size = f"{self._job.out.name} ({self._job.kind})", len(self._tuned.rows), path.stat().st_size
        if kept is None:
            same = f"the same answer in {round(found.same_answers * rows)} of {counted(rows, 'row')}"
            self._say(f"{name}: {size_text(size)}, loss {found.loss:.4f} ({self._tuned.own.loss:.4f} before), {same}")
        else:
            self._say(describe(name, size, kept, found, rows, why or "holds"))
        self._say(f"its divergence from the tuned model: {found.divergence:.1e} nats per label")
        if why:
            raise ModelError(
                f"This GGUF file does not keep what was learnt: {self._job.kind}: {why}.",
                where=str(self._job.out),
                expected="" if kept is None else f"at least {100 * (1 - self._job.may_lose):g} % kept",
                got="" if kept is None else f"{100 * kept:.1f} %",
                do="choose more bits (--type q8_0, bf16, f16), or take it as it is with --may-lose 100",
            )
        return found, kept

    def _require_same(self, in_llama: float, in_mlx: float) -> None:
        """Raise ModelError where llama.cpp computes something else from the weights than mlx does."""
        most = LLAMA_TIMES * in_mlx + LLAMA_MORE
        if not in_llama <= most and self._job.may_lose < 1:
            raise ModelError(
                "llama.cpp computes something else from this file than was trained.",
                where=self._family.architecture,
                expected=f"a divergence below {most:.1e} nats per label",
                got=f"{in_llama:.1e}; mlx, with the same weights: {in_mlx:.1e}",
                do="keep it as an MLX model (safetrain fuse), and report this model's architecture",
            )


def _name(job: GgufJob, family: Family, vocabulary: Vocabulary) -> str:
    """The model's name, which llama.cpp also takes for a hint."""
    name = job.out.stem
    if family.architecture == "phi3" and vocabulary.strips_behind:
        return name if STRIPPING in name.lower() else f"{name} ({STRIPPING})"
    return name.lower().replace("phi-3", "phi 3").replace("phi3", "phi 3") if "phi" in name.lower() else name


def _write_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)

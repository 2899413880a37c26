"""The command `safetrain evaluate`: any model, with or without an adapter, alone or beside its base."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safetrain.cli_project import params
from safetrain.core.errors import ConfigError
from safetrain.core.formatting import print_text
from safetrain.core.signals import ending_at_once
from safetrain.core.storage import paths

if TYPE_CHECKING:
    from safetrain.core.data.token_rows import TokenRows
    from safetrain.core.data.training_rows import HeldOut
    from safetrain.core.records.metrics import RunShape
    from safetrain.core.records.scoring import ModelMeasures
    from safetrain.engine.comparison import Subject

USUAL_LENGTH, SECONDS = 2048, 30.0  # tokens per row; time for answers without --max-questions
MORE = "--max-questions"
TEST_ROWS = paths.VALIDATED / "test.jsonl"


def evaluate(
    model: Annotated[Path | None, typer.Option(help="model folder; default: the adapter's own base")] = None,
    adapter: Annotated[Path | None, typer.Option(help="adapter folder, compared with the model without it")] = None,
    base: Annotated[Path | None, typer.Option(help="model folder to compare with")] = None,
    data: Annotated[Path | None, typer.Option(help="a data file; default: the project's test rows")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print all figures as one JSON object")] = False,
    max_examples: Annotated[int | None, typer.Option(min=1, help="use only the first N rows")] = None,
    max_questions: Annotated[
        int | None, typer.Option(min=1, help="answer N questions; default: half a minute's worth")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=4096, help="longest answer, in tokens")] = 48,
) -> None:
    """Measure any model, and compare it with its base.

    Measures the loss on rows and on general text, and scores answers. Rows are truncated as in training, or at 2,048
    tokens.

    With --adapter, a model is compared with itself without the adapter; with --base, with that base. The command reads
    the project's test rows, their length and the data section of params.yaml; it writes no file.
    """
    from safetrain.core.data.tokenizer import ChatTokenizer, general_text
    from safetrain.core.model.files import read_model_files
    from safetrain.core.records.adapter_files import fingerprint
    from safetrain.core.records.evaluation import describe_evaluation
    from safetrain.core.records.scoring import evaluation_of
    from safetrain.engine.cpu.blas import load_fast_blas
    from safetrain.watch.progress import EvaluationProgress, say_on_terminal, still_working

    subjects = _subjects(model, adapter, base)
    files = read_model_files(subjects[-1][1])
    length = min(_trained_length(), files.max_positions or USUAL_LENGTH)
    with still_working("reading rows"):
        rows = _rows(data, files.folder, max_examples, length)
    for remark in rows.remarks(length, max_new_tokens):
        print_text(remark, sys.stderr)
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.comparison import Examination

    tokenizer, run = ChatTokenizer(files.folder), _run_shape(subjects, length)
    general = general_text(tokenizer, files.vocab_size, files.max_positions)
    progress = EvaluationProgress(say_on_terminal)
    with ending_at_once():
        found = Examination(rows, general, run, max_new_tokens, max_questions, SECONDS, progress).measure(*subjects)
    report: dict[str, Any] = {
        "model": str(files.folder), "adapter": str(adapter or ""), "base": str(subjects[0][1]) if found[1:] else "",
        "data": str(data or TEST_ROWS), "alone": None, "beside_base": None,
    }  # fmt: skip
    if found[1:]:
        name = fingerprint(adapter) if adapter else ""
        evaluation = evaluation_of(rows, general, files.vocab_size, found[0], found[1], tokenizer.decode, name)
        report["beside_base"], lines = dataclasses.asdict(evaluation), describe_evaluation(evaluation, MORE)
    else:
        report["alone"], lines = _alone(rows, general.rows, found[0], tokenizer.decode)
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_text("\n".join(lines))


def _alone(
    rows: "HeldOut", general: "TokenRows", model: "ModelMeasures", decode: Callable[[Sequence[int]], str]
) -> tuple[dict[str, Any], list[str]]:
    """Figures of one model, and sentences about them."""
    from safetrain.core.records.evaluation import describe_answered
    from safetrain.core.records.scoring import mean_loss, score

    answers = [decode(ids) for _, ids in sorted(model.answers.items())]
    expected = [decode(rows.questions[number].answer) for number in sorted(model.answers)]
    own = score(mean_loss(model.losses, rows.rows.label_counts), answers, expected)
    general_loss = mean_loss(model.general, general.label_counts) if len(general) else None
    lines = [f"Test loss {own.loss:.3f} nats per token, perplexity {own.perplexity:.2f}."]
    if answers:
        shares = own.exact_match, own.exact_match_low, own.exact_match_high
        exact, low, high = (100 * (each or 0.0) for each in shares)
        lines.append(f"Exact match {exact:.1f} % (95 %: {low:.1f} to {high:.1f}), token F1 {own.token_f1:.3f}.")
    if general_loss is not None:
        lines.append(f"Loss on general text {general_loss:.3f} nats per token.")
    if remark := describe_answered(len(answers), rows.questions_available, MORE):
        lines.append(f"{remark}.")
    counts = {"rows": len(rows.rows), "questions": rows.questions_available, "answered": len(answers)}
    return {"score": dataclasses.asdict(own), "general_loss": general_loss, **counts}, lines


def _trained_length() -> int:
    """Tokens per row in the project's last training run, or USUAL_LENGTH."""
    from safetrain.core.records.metrics import read_run_shape

    return read_run_shape(paths.SUMMARY).max_seq_length if paths.SUMMARY.is_file() else USUAL_LENGTH


def _rows(data: Path | None, model: Path, max_examples: int | None, length: int) -> "HeldOut":
    """Rows of the project's token store if it has this tokenizer; otherwise, read and tokenize them."""
    from safetrain.core.data.store import open_split, read_made, store_path
    from safetrain.core.data.training_rows import held_out_in
    from safetrain.core.model.files import tokenizer_hash
    from safetrain.data.tokenize import settings_of
    from safetrain.data.validate import read_held_out

    if data is None and not TEST_ROWS.is_file():
        raise ConfigError("No test rows found.", where=str(TEST_ROWS.absolute()), do="name a data file with --data")
    provenance = read_made(store_path(paths.VALIDATED, "test")) if data is None else None
    if provenance is not None and provenance.tokenizer == tokenizer_hash(model):
        return held_out_in(open_split("test", model), max_examples, length)
    settings = settings_of(params().data if Path("params.yaml").is_file() else None)
    if data is None:  # these have the usual keys
        settings = dataclasses.replace(settings, columns=None)
    return read_held_out(data or TEST_ROWS, model, settings, max_examples, length)


def _subjects(model: Path | None, adapter: Path | None, base: Path | None) -> "tuple[Subject, ...]":
    """One model, or base and tuned; raises ConfigError if tokenizers differ, ModelError if the adapter's base does."""
    from safetrain.core.model.files import make_same_tokens, read_model_files
    from safetrain.core.records.adapter_files import base_of, require_base

    if adapter is not None and base is not None:
        raise ConfigError(
            "--adapter and --base are two ways to compare.",
            do="leave --base out: a model with an adapter is compared with itself without it",
        )
    if adapter is not None:
        folder = model or base_of(adapter)
        require_base(adapter, folder, read_model_files(folder).fingerprint)
        return ("base", folder, None), ("tuned", folder, adapter)
    if model is None:
        raise ConfigError("There is nothing to measure.", do="name a model folder: safetrain evaluate --model FOLDER")
    if base is None:
        return (("model", model, None),)
    if not make_same_tokens(base, model):
        raise ConfigError(
            "The two models have different tokenizers, so their losses count different tokens.",
            where=f"{model}, {base}",
            do="measure them one at a time: leave --base out",
        )
    return ("base", base, None), ("tuned", model, None)


def _run_shape(subjects: Sequence["Subject"], length: int) -> "RunShape":
    """One row of full length at a time, in the available memory; raises MachineError if the model is larger."""
    from safetrain.core.model.files import read_model_files
    from safetrain.core.records.metrics import RunShape
    from safetrain.engine.backend import room_bytes
    from safetrain.engine.tuned import require_memory

    room, size = room_bytes(), max(read_model_files(folder).static_bytes for _, folder, _ in subjects)
    require_memory(size, "the model", "close other programs, or quantize it: safetrain convert")
    return RunShape(batch_size=1, max_seq_length=length, dequantize_base=False, compute_dtype=None,
                    peak_memory_bytes=room, predicted_peak_bytes=room, elapsed_seconds=0.0)  # fmt: skip

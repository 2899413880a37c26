"""The commands of `safetrain` that look at a run or measure a model: monitor, report, track and evaluate."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import print_text, similar_path
from safetrain.core.signals import Terminated, ending_at_once
from safetrain.core.storage import paths
from safetrain.core.storage.files import require_new
from safetrain.project import console, params, require_project

if TYPE_CHECKING:
    from rich.console import Console

    from safetrain.core.data.tokenizer import ChatTokenizer, GeneralText
    from safetrain.core.data.training_rows import HeldOut
    from safetrain.core.records.scoring import ModelMeasures
    from safetrain.engine.comparison import Subject
    from safetrain.watch.monitor import MonitorView

    Look = Callable[[], MonitorView]

GONE_LOOKS = 3  # readings in a row without a process mean that the run has ended: there are gaps between processes
USUAL_LENGTH, SECONDS = 2048, 30.0  # tokens per row; time for answers without --max-questions
TEST_ROWS = paths.VALIDATED / "test.jsonl"


def monitor(
    refresh: Annotated[float, Option(min=0.2, max=3600, help="seconds between readings")] = 5.0,
    plain: Annotated[bool, Option("--plain", help="print a line of text per reading, for a log")] = False,
    once: Annotated[bool, Option("--once", help="read once, and exit")] = False,
    output: Annotated[Path, Option(help="folder of the run")] = paths.OUTPUT,
) -> None:
    """Watch a training run from a second terminal, or see how it ended.

    Shows losses, speed, memory, the current phase, checkpoints and time left. Ctrl-C leaves; training continues.
    """
    from rich.console import Console

    from safetrain.core.run_folder import RunReader
    from safetrain.watch.monitor import look_at

    if not output.is_dir() and output == paths.OUTPUT:
        require_project()
    elif not output.is_dir():
        do = similar_path(output) or "name the folder of a run: --output"
        raise ConfigError("The folder does not exist.", where=str(output), do=do)
    reader, screen = RunReader(output), Console(highlight=False, markup=False, emoji=False)
    is_text = plain or not sys.stdout.isatty() or screen.is_dumb_terminal or screen.options.ascii_only
    try:
        if is_text:
            _print_lines(lambda: look_at(reader), refresh, once)
        else:
            _draw(lambda: look_at(reader), refresh, once, screen)
    except Terminated:
        raise
    except KeyboardInterrupt:  # the user leaves
        return


def _print_lines(look: "Look", refresh: float, once: bool) -> None:
    """Print a line for each reading until the training has ended; the last line says so."""
    from safetrain.watch.monitor_screen import plain_line

    gone = GONE_LOOKS - 1
    while True:
        view = look()
        gone = 0 if view.state.is_running else gone + 1
        if gone in (0, GONE_LOOKS):
            print(plain_line(view), flush=True)
        if once or gone == GONE_LOOKS:
            return
        time.sleep(min(refresh, 1.0) if gone else refresh)


def _draw(look: "Look", refresh: float, once: bool, screen: "Console") -> None:
    """Draw until the user leaves, or only once if nothing is running."""
    from rich.live import Live

    from safetrain.watch.monitor_screen import MonitorScreen, plain_line

    view = look()
    if once or not view.state.is_running:
        screen.print(MonitorScreen(view), height=min(max(screen.height - 1, 16), 40))
        return
    try:
        with Live(MonitorScreen(view), console=screen, screen=True, refresh_per_second=1) as live:
            while True:
                time.sleep(refresh)
                view = look()
                live.update(MonitorScreen(view), refresh=True)
    finally:
        print_text(plain_line(view).replace("  ", "\n"))


def report(
    out: Annotated[Path | None, Option(help="write here; default: checkpoints_qlora/report.html")] = None,
) -> None:
    """Write a page about the last run: one self-contained file."""
    from safetrain.core.run_folder import read_run
    from safetrain.watch.report import write_report

    require_project()
    target = out or paths.REPORT
    if target.suffix != ".html":
        raise ConfigError("The report is an HTML page.", where=str(target), do="name a file: --out NAME.html")
    if target.resolve() != paths.REPORT.resolve():  # the default page is overwritten each time
        require_new(target, "name another file, or remove this one first")
    write_report(read_run(), target)
    print(f"{target}: open it in a browser")


def track(
    project: Annotated[str, Option(help="W&B project; default: $WANDB_PROJECT, else safetrain")] = "",
    name: Annotated[str, Option(help="name of the run; default: W&B's choice")] = "",
) -> None:
    """Send a run to W&B.

    Sends steps, settings and scores, but no rows or answers. Each call makes a new run there. With WANDB_MODE=offline,
    it needs no account.
    """
    from safetrain.core.run_folder import read_run
    from safetrain.watch.trackers import export

    require_project()
    with console().status("sending to W&B"):
        line = export(read_run(), project, name)
    print_text(line)


def evaluate(
    model: Annotated[Path | None, Option(help="model folder; default: the adapter's own base")] = None,
    adapter: Annotated[Path | None, Option(help="adapter folder; compares the model with and without it")] = None,
    base: Annotated[Path | None, Option(help="model folder to compare with")] = None,
    data: Annotated[Path | None, Option(help="a data file; default: the project's test rows")] = None,
    as_json: Annotated[bool, Option("--json", help="print all figures as one JSON object")] = False,
    max_examples: Annotated[int | None, Option(min=1, help="use only the first N rows")] = None,
    max_questions: Annotated[int | None, Option(min=1, help="questions to answer; default: 30 s of answers")] = None,
    max_new_tokens: Annotated[int, Option(min=1, max=4096, help="longest answer, in tokens")] = 48,
) -> None:
    """Measure any model, and compare it with its base.

    Measures the loss on rows and on general text, and scores answers. Rows are truncated as in training, or at 2,048
    tokens if there was none.

    With --adapter, a model is compared with itself without the adapter; with --base, with that base. The command reads
    the project's test rows, their length and the data section of params.yaml; it writes no file.
    """
    from safetrain.core.data.tokenizer import ChatTokenizer, general_text
    from safetrain.core.model.files import read_model_files
    from safetrain.core.records.metrics import RunShape
    from safetrain.core.storage.files import read_result
    from safetrain.engine.cpu.blas import load_fast_blas
    from safetrain.watch.progress import EvaluationProgress, still_working

    subjects = _subjects(model, adapter, base)
    files = read_model_files(subjects[-1][1])
    trained = read_result(paths.SUMMARY, RunShape).max_seq_length if paths.SUMMARY.is_file() else USUAL_LENGTH
    length = min(trained, files.max_positions or USUAL_LENGTH)
    with still_working("reading rows"):
        rows = _rows(data, files.folder, max_examples, length)
    for remark in rows.remarks(length, max_new_tokens):
        print_text(remark, sys.stderr)
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.backend import room_bytes
    from safetrain.engine.comparison import Examination
    from safetrain.engine.tuned import require_memory

    size, room = max(read_model_files(folder).static_bytes for _, folder, _ in subjects), room_bytes()
    require_memory(size, "the model", "close other programs, or quantize it: safetrain convert")
    run = RunShape(1, length, False, None, room, room, 0.0)  # one row at a time, in the available memory
    tokenizer = ChatTokenizer(files.folder)
    general = general_text(tokenizer, files.vocab_size, files.max_positions)
    limits = max_new_tokens, max_questions, SECONDS
    with ending_at_once():
        found = Examination(rows, general, run, *limits, EvaluationProgress()).measure(*subjects)
    figures, lines = _figures(found, rows, general, files.vocab_size, tokenizer, adapter)
    names = {"model": files.folder, "adapter": adapter or "", "base": subjects[0][1] if found[1:] else ""}
    names["data"] = data or TEST_ROWS
    if as_json:
        print(json.dumps(names | figures, indent=2, ensure_ascii=False, default=str))
    else:
        print_text("\n".join(lines))


def _figures(
    found: "list[ModelMeasures]", rows: "HeldOut", general: "GeneralText", vocabulary: int,
    tokenizer: "ChatTokenizer", adapter: Path | None,
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """Figures of one model, or of two side by side, and sentences about them."""
    from safetrain.core.records import scoring
    from safetrain.core.records.adapter_files import fingerprint
    from safetrain.core.records.evaluation import describe_answered, describe_evaluation

    name = fingerprint(adapter) if adapter else ""
    evaluation = scoring.evaluation_of(rows, general, vocabulary, found[0], found[-1], tokenizer.decode, name)
    if found[1:]:
        return {"alone": None, "beside_base": asdict(evaluation)}, describe_evaluation(evaluation)
    score, counts = evaluation.tuned, general.rows.label_counts
    general_loss = scoring.mean_loss(found[0].general, counts) if len(counts) else None
    lines = [f"Test loss {score.loss:.3f} nats per token, perplexity {score.perplexity:.2f}."]
    if score.exact_match is not None:
        lines.append(f"Exact match {100 * score.exact_match:.1f} %, token F1 {score.token_f1:.3f}.")
    if general_loss is not None:
        lines.append(f"Loss on general text {general_loss:.3f} nats per token.")
    lines += [f"{remark}." for remark in describe_answered(evaluation.answered, evaluation.questions)]
    alone = {name: getattr(evaluation, name) for name in ("rows", "questions", "answered")}
    alone |= {"score": asdict(score), "general_loss": general_loss}
    return {"alone": alone, "beside_base": None}, lines


def _rows(data: Path | None, model: Path, max_examples: int | None, length: int) -> "HeldOut":
    """Take the rows from the project's token store if this tokenizer made it; otherwise, read and tokenize them."""
    from safetrain.core.data.store import open_split, read_made, store_path
    from safetrain.core.data.training_rows import held_out_in
    from safetrain.core.model.files import tokenizer_hash
    from safetrain.data.tokenize import settings_of
    from safetrain.data.validate import read_held_out

    made = read_made(store_path(paths.VALIDATED, "test")) if data is None else None
    if made is not None and made.tokenizer == tokenizer_hash(model):
        return held_out_in(open_split("test", model), max_examples, length)
    settings = settings_of(params().data if Path("params.yaml").is_file() else None)
    if data is None:  # the project's test rows have the usual keys
        settings = replace(settings, columns=None)
    return read_held_out(data or TEST_ROWS, model, settings, max_examples, length)


def _subjects(model: Path | None, adapter: Path | None, base: Path | None) -> "tuple[Subject, ...]":
    """One model, or base and tuned. Raises ConfigError if tokenizers differ, ModelError for another base's adapter."""
    from safetrain.core.model.files import make_same_tokens, read_model_files
    from safetrain.core.records.adapter_files import base_of, require_base

    if adapter is not None:
        if base is not None:
            do = "leave --base out: a model with an adapter is compared with itself without it"
            raise ConfigError("--adapter and --base cannot be combined.", do=do)
        folder = model or base_of(adapter)
        require_base(adapter, folder, read_model_files(folder).fingerprint)
        return ("base", folder, None), ("tuned", folder, adapter)
    if model is None:
        raise ConfigError("There is nothing to measure.", do="name a model folder: safetrain evaluate --model FOLDER")
    if base is None:
        return (("model", model, None),)
    if not make_same_tokens(base, model):
        what = "The two models have different tokenizers, so their losses count different tokens."
        do = "measure them one at a time: leave --base out"
        raise ConfigError(what, where=f"{model}, {base}", do=do)
    return ("base", base, None), ("tuned", model, None)

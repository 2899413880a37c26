"""Commands of `safetrain` to run before training: validate, preflight, estimate and selftest."""

import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from safetrain.core.errors import DataError, MachineError, SafetrainError
from safetrain.core.formatting import print_text
from safetrain.core.records.schema import PRETRAIN, rows_together
from safetrain.core.signals import exit_code_of
from safetrain.core.storage import paths
from safetrain.project import console, model_of_params, params, require_project, stage_module

PROBE = "safetrain.engine.dry_run"
Method = StrEnum("Method", "lora dora full dpo orpo pretrain")


def validate(
    files: Annotated[list[Path] | None, Argument(help="data files or folders; default: data.path")] = None,
    model: Annotated[Path | None, Option(help="model folder; default: model.path of params.yaml")] = None,
    show_mask: Annotated[int | None, Option(help="show N rows with labels marked; -1: all", min=-1)] = None,
    as_json: Annotated[bool, Option("--json", help="print one JSON object")] = False,
    fix: Annotated[Path | None, Option(help="write a repaired copy, a .jsonl file")] = None,
    drop: Annotated[list[str] | None, Option(help="--fix leaves out rows with these findings")] = None,
    drop_bad: Annotated[bool, Option("--drop-bad", help="--fix leaves out rows that cannot be read")] = False,
    columns: Annotated[list[str] | None, Option(help="your column name, e.g. prompt=frage; repeatable")] = None,
) -> None:
    """Check a data file row by row; --fix writes a repaired copy.

    Exit 0: no errors; 1: errors; 2: a file or the model is missing.

    Plain text (.txt, .md) is read as documents; with train.method=pretrain, every file is.

    params.yaml, if present, sets severities (data.downgrade) and your own column names (data.columns).
    --columns prompt=frage --columns completion=antwort sets the column names for one run.

    With --fix: exit 0 if the copy is written, 1 if rows cannot be read (see --drop-bad).
    """
    from safetrain.data import command
    from safetrain.data.tokenize import settings_of
    from safetrain.watch.progress import still_working

    try:
        config = params() if Path("params.yaml").is_file() else None
        documents = config is not None and config.train.method == PRETRAIN
        settings = settings_of(config.data if config else None, columns or (), documents=documents)
        paths = files or [Path(params().data.path)]
        with still_working("reading rows"):
            if fix is None:
                command.refuse_idle({"--drop": drop, "--drop-bad": drop_bad}, "Without")
                sys.exit(command.report(paths, model or model_of_params(), settings, show_mask, as_json=as_json))
            command.refuse_idle({"--show-mask": show_mask, "--json": as_json}, "With")
            tokenizer_model = model or (model_of_params() if drop else Path())
            sys.exit(command.fix(paths, fix, tokenizer_model, settings, ",".join(drop or ()), drop_bad=drop_bad))
    except SafetrainError as error:
        exit_code_of(error)
        sys.exit(1 if fix is not None and isinstance(error, DataError) else 2)


def preflight(
    as_json: Annotated[bool, Option("--json", help="print only preflight_report.json")] = False,
    overrides: Annotated[list[str] | None, Argument(help="Hydra overrides: preflight.level=quick …")] = None,
) -> None:
    """Check machine, data, model, memory and disk.

    Exit 0: no check failed; 1: a check failed; 2: could not be determined.
    """
    from safetrain.plan.child import run_to_its_end

    require_project()
    if as_json:
        paths.PREFLIGHT_REPORT.unlink(missing_ok=True)
    command = [sys.executable, "-m", stage_module("preflight"), *(overrides or [])]
    code = run_to_its_end(command, subprocess.DEVNULL if as_json else None)
    if as_json and paths.PREFLIGHT_REPORT.is_file():
        print(paths.PREFLIGHT_REPORT.read_text(encoding="utf-8"), end="")
    sys.exit(code)


def estimate(
    model: Annotated[
        Path | None, Argument(help="model folder, config.json, preset or hub:OWNER/NAME; default: model.path")
    ] = None,
    machine: Annotated[str | None, Option(help="a machine of conf/machines.yaml, e.g. m1-8gb")] = None,
    memory_gb: Annotated[float | None, Option(min=0.1, help="plan for this memory budget, in GiB")] = None,
    batch_size: Annotated[int, Option(min=1, help="rows in a micro-batch")] = 1,
    tokens: Annotated[int, Option(min=8, help="tokens in the longest row")] = 512,
    rank: Annotated[int, Option(min=1, help="LoRA rank")] = 16,
    recompute: Annotated[bool, Option("--recompute", help="train.gradient_checkpointing=true")] = False,
    method: Annotated[Method, Option(help="how to train; the memory is that of Adam")] = Method.lora,
    num_layers: Annotated[int | None, Option(min=1, help="trained blocks, from the top; default: all")] = None,
    as_json: Annotated[bool, Option("--json", help="print one JSON object")] = False,
) -> None:
    """Estimate memory, for this machine or another.

    Exit 1: training does not fit. The command reads no weights; of a model on the Hub it fetches config.json alone.
    The presets are those of model.create.
    """
    from safetrain.plan import estimate as estimates
    from safetrain.plan.machine import HERE, machine_to_plan_for

    files = estimates.model_to_estimate(model or model_of_params())
    here = machine_to_plan_for(machine, memory_gb, PROBE)
    run = estimates.estimate_of(
        files, here, rank, num_layers, method=method.value, gradient_checkpointing=recompute,
        batch_size=max(batch_size, rows_together(method.value)), max_seq_length=tokens,
    )  # fmt: skip
    if as_json:
        print(json.dumps(found := estimates.facts_of(run), indent=2))
        sys.exit(0 if found["may_fit"] else 1)
    sys.exit(0 if estimates.print_estimate(console(), run, machine or HERE) else 1)


def selftest(
    model: Annotated[Path, Argument(help="model folder")] = Path("models/encyclopedia-3m"),
    report: Annotated[bool, Option("--report", help="measure this machine; print a report for an issue")] = False,
) -> None:
    """Check that this machine computes correctly; --report measures it.

    The check compares a model's loss and gradient with those of mlx-lm's own layers.
    """
    from safetrain.core.model.files import read_model_files
    from safetrain.plan import preflight as tests

    if report:
        print("This takes less than a minute. Paste the block below into an issue.", file=sys.stderr)
        for line in tests.report_lines(PROBE, model):
            print(line, flush=True)
        return
    read_model_files(model)
    results = tests.selftest(PROBE, model)
    for name, text, passed in results:
        print_text(tests.result_line(name, text, passed))
    if not all(passed for _, _, passed in results):
        what = "The self-test failed: this backend's results differ from those of mlx-lm's own layers."
        do = "do not train on this machine; try another mlx version, and report these figures"
        raise MachineError(what, where=model, do=do)
    print("the self-test passed")

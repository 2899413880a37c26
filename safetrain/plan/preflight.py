"""The checks before training, and `safetrain selftest`: functions that turn facts into verdicts and change nothing."""

import dataclasses
import importlib.metadata
import platform
import resource
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from safetrain.core.data.training_rows import TrainingRows, load_training_rows, order_fingerprint
from safetrain.core.errors import ConfigError, DataError, MachineError, ModelError
from safetrain.core.formatting import counted
from safetrain.core.formatting import size_text as size
from safetrain.core.hosts import hosts_of
from safetrain.core.memory.system import (
    CRITICAL,
    FREE_PERCENT,
    GIB,
    PRESSURE_LEVEL,
    PROCESS_BYTES,
    own_limit_bytes,
    sysctl_number,
)
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.model.shapes import FAMILIES
from safetrain.core.records.adapter_files import start_of, starting_point
from safetrain.core.records.reports import DataReport, Machine, require_data_of, require_source
from safetrain.core.records.run_state import RunIdentity, RunState, checkpoints_in
from safetrain.core.records.schema import WHOLE, Pipeline, Train
from safetrain.core.records.settings import Recommendation
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_or_none, read_result
from safetrain.core.storage.paths import POINTER
from safetrain.plan.candidates import PlanInputs
from safetrain.plan.check_report import FAIL, MARKS, PASS, Check, from_error, skipped, verdict
from safetrain.plan.child import NOT_INSTALLED, ChildFailed, room_bytes, run_json, version_of
from safetrain.plan.machine import SLOW_GFLOPS, TIMEOUT_SECONDS, Probe, ask_engine, read_machine_now, settle
from safetrain.plan.recommend import plan_run

PLANNED = "DISK-FREE", "MEM-FIT"  # checked by making a plan
LEAST_BUDGET_BYTES, GOOD_BUDGET_BYTES = GIB // 4, GIB
# An idle 8 GB M1 has 54 % or more; at 44 %, a run of 11 GB failed in 24 GB (john-rocky/apple-silicon-llm-bench #7).
LITTLE_FREE_PERCENT = 45
FLOAT32_TOLERANCE, TF32_TOLERANCE, SIXTEEN_BIT_TOLERANCE = 1e-3, 1e-2, 0.1  # of the self-test
ROWS, TOKENS = "3", "64"  # of its pass
FENCE = "```"  # keeps the columns aligned in an issue


def examine(
    config: Pipeline, folder: Path, before: Machine | None, module: str, say: Callable[[str], None]
) -> tuple[list[Check], Machine | None]:
    """Run all checks of preflight.level and read the machine, which is None if mlx does not work.

    ``folder`` is the model's, ``before`` the machine as last recorded; the engine's ``module`` tries out both.
    """
    train, level = config.train, config.preflight.level
    model, model_check = model_files(folder)
    probe, why_not = ask_engine(module, model, level, own_limit_bytes(train.memory_limit_gb))
    machine = settle(read_machine_now(probe), before) if probe else None
    data, rows, data_check = _data(config, model)
    identity = None
    if model is not None and rows is not None:
        start = starting_point(model.fingerprint, start_of(train.from_adapter))
        identity = RunIdentity(start, rows.train_digest, rows.valid_digest, "", order_fingerprint())
    checks = [packages_check()]
    if machine is not None and probe is not None:
        checks += engine_checks(machine, probe)
    else:
        checks.append(verdict("HW-GPU", False, True, f"mlx does not work here: {why_not}", "mlx starts"))
    held_bytes = model.static_bytes if model is not None and must_fit(train) else 0
    checks += [*environment_checks(held_bytes), model_check, data_check]
    checks += [previous_run_check(paths.OUTPUT, identity), *_hosts_check(train)]
    if machine is None or probe is None or model is None:
        why = "the model is incomplete" if model is None else "mlx does not work"
        return [*checks, *(skipped(each, why) for each in ("MODEL-LOAD", "MODEL-TRAIN", *PLANNED))], machine
    checks += model_checks(model, machine, probe, train, level)
    if data is None or rows is None or FAIL in (each.status for each in checks[-2:]):
        why = "the data is missing" if data is None else "the weights do not fit, or the model cannot be trained"
        return [*checks, *(skipped(each, why) for each in PLANNED)], machine
    inputs = PlanInputs(data, machine, model, rows)
    return [*checks, *_plan_checks(config, inputs, module if level == "certify" else "", say)], machine


def packages_check() -> Check:
    """Compare the installed packages with safetrain's requirements: a missing one fails, another version warns."""
    wrong, critical, texts = list[str](), False, [f"Python {platform.python_version()} on {platform.platform()}"]
    for line in map(Requirement, importlib.metadata.requires("safetrain") or ()):
        if line.marker is None or line.marker.evaluate({"extra": ""}):
            version = version_of(line.name)
            texts.append(f"{line.name} {version}")
            if version == NOT_INSTALLED or version not in line.specifier:
                wrong.append(f"{line.name}{line.specifier}")
                critical |= version == NOT_INSTALLED
    return verdict("PACKAGES", not wrong, critical, ", ".join(texts), ", ".join(wrong))


def engine_checks(machine: Machine, probe: Probe) -> Iterator[Check]:
    """Check memory, backend and BLAS."""
    memory, budget, gpu = psutil.virtual_memory(), machine.memory_budget_bytes, machine.backend != "cpu"
    yield verdict("HW-RAM", budget >= GOOD_BUDGET_BYTES, budget < LEAST_BUDGET_BYTES,
                  f"budget {size(budget)}; {size(memory.available)} available of {size(memory.total)}",
                  f"at least {size(LEAST_BUDGET_BYTES)}, preferably {size(GOOD_BUDGET_BYTES)}")  # fmt: skip
    text = "cpu (no GPU: fine for tests and small models)"
    if gpu:
        text = f"{machine.backend}: {machine.device}, {probe.gemm_gflops:,.0f} GFLOP/s in float32"
        text += f", {size(probe.working_set_bytes)} for one process" if probe.working_set_bytes else ""
        text += f", emulates bfloat16, computes in {machine.compute_dtype}" if machine.compute_dtype else ""
    text += f"; {machine.chip}, {counted(machine.physical_cores, 'core')}, {machine.architecture}"
    yield verdict("HW-GPU", gpu or sys.platform != "darwin", False, text, "Metal on a Mac")
    if not gpu:
        text = f"{probe.blas}, {probe.gemm_gflops:.0f} GFLOP/s in float32"
        text = text if probe.blas_is_fast else f"{text}; {probe.blas_reason}"
        needed = f"a fast BLAS, at least {SLOW_GFLOPS:.0f} GFLOP/s"
        yield verdict("CPU-BLAS", probe.blas_is_fast and probe.gemm_gflops >= SLOW_GFLOPS, False, text, needed)


def environment_checks(static_bytes: int) -> Iterator[Check]:
    """Check limits of the shell, and memory used by other programs."""
    kinds = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA}
    limits = {resource.getrlimit(kind)[0]: flag for flag, kind in kinds.items()}
    limit = min((each for each in limits if each != resource.RLIM_INFINITY), default=None)
    least = static_bytes + PROCESS_BYTES
    text = "no limit" if limit is None else f"ulimit {limits[limit]} is {size(limit)}"
    needed = f"no limit, or at least {size(least)}; on CPU, mlx crashes if an allocation fails"
    yield verdict("ENV-ULIMIT", limit is None, limit is None or limit < least, text, needed)
    if sys.platform == "darwin":
        yield pressure_check(sysctl_number(PRESSURE_LEVEL), sysctl_number(FREE_PERCENT))


def pressure_check(level: int, free_percent: int) -> Check:
    """Check macOS's own measure of memory pressure.

    Swap in use means nothing: macOS swaps idle pages even with half of its memory free, and enlarges swap on demand.
    Level 2 means little: 8 GB machines stay at it with 46 % free.
    """
    short = level >= CRITICAL or 0 < free_percent < LITTLE_FREE_PERCENT
    text = f"memory pressure level {level}, {free_percent} % free"
    return verdict("ENV-SWAP", not short, False, text, f"level below {CRITICAL}, at least {LITTLE_FREE_PERCENT} % free")


def model_files(folder: Path) -> tuple[ModelFiles | None, Check]:
    """Read the model's files; None if they are incomplete."""
    try:
        model = read_model_files(folder)
    except ModelError as error:
        return None, from_error("MODEL-FILES", error)
    bits = f"{model.quantization_bits}-bit" if model.quantization_bits else "not quantized"
    text = f"{folder}: {model.model_type}, {model.parameters / 1e6:.1f}M parameters, {bits}, {size(model.static_bytes)}"
    return model, Check("MODEL-FILES", PASS, True, text)


def _data(config: Pipeline, model: ModelFiles | None) -> tuple[DataReport | None, TrainingRows | None, Check]:
    """Read the data report and the rows; None if validate_data has not run or found no rows."""
    try:
        if not paths.DATA_REPORT.is_file():
            require_source(config.data.path)
        data = read_result(paths.DATA_REPORT, DataReport)
        require_data_of(data, config.data.path)
        rows = load_training_rows(model.folder, config.train.max_examples) if model else None
        if rows is not None:
            rows.require_rows_for(config.train.method)
    except (ConfigError, DataError) as error:
        return None, None, from_error("DATA-FILES", error)
    return data, rows, data_check(data)


def data_check(report: DataReport) -> Check:
    """Check that each split has rows; the check also warns if the data has warnings."""
    counts, noun = [split.pairs or split.rows for _, split in report.splits], "pairs" if report.train.pairs else "rows"
    ok, text = all(counts), "{} train, {} valid, {} test {} from {}".format(*counts, noun, report.source)
    return verdict("DATA-FILES", ok and not report.warnings, not ok, "; ".join([text, *report.warnings]),
                   "at least one row in each split")  # fmt: skip


def disk_check(folder: Path, needed_bytes: int) -> Check:
    free, better = shutil.disk_usage(folder).free, needed_bytes + GIB
    return verdict("DISK-FREE", free >= better, free < needed_bytes, f"{size(free)} free",
                   f"{size(needed_bytes)} for checkpoints and adapter, preferably {size(better)}")  # fmt: skip


def previous_run_check(output: Path, planned: RunIdentity | None) -> Check:
    """Check that ``planned`` can resume an unfinished run: with another model or rows, train refuses (exit code 7).

    The settings of ``planned`` are not compared.
    """
    state = read_or_none(output / POINTER, RunState)
    if state is None or state.finished or planned is None or not checkpoints_in(output):
        return Check("RUN-PREV", PASS, True, "no unfinished run")
    differences = dataclasses.replace(planned, settings=state.identity.settings).differences(state.identity)
    text = f"an unfinished run stopped at step {state.step}"
    text += f", and this run differs in: {', '.join(differences)}" if differences else ""
    return verdict("RUN-PREV", not differences, True, text, "the same data and model, or no unfinished run")


def _hosts_check(train: Train) -> Iterator[Check]:
    """Check hosts.json, if several ranks train; the ranks themselves compare versions, data and model."""
    if train.ranks == 1:
        return
    try:
        here = hosts_of(train.ranks).ranks_here
    except ConfigError as error:
        yield from_error("HOSTS-FILE", error)
        return
    yield Check("HOSTS-FILE", PASS, True, f"{counted(train.ranks, 'rank')}, {here} on this machine")


def model_checks(
    model: ModelFiles, machine: Machine, probe: Probe, train: Train, level: str = "probe"
) -> Iterator[Check]:
    """Check that mlx-lm loads the model, that it can be trained, and that its weights fit the memory budget.

    Models cannot be trained if their kernels have no gradients, or if their attention sees later tokens.
    """
    if probe.loads is None:
        why = "level quick does not load the model" if level == "quick" else "the model exceeds the memory budget"
        yield skipped("MODEL-LOAD", why)
    else:
        text = f"loads in {probe.load_seconds:.1f} s, forward pass works (cached per model and installation)"
        yield verdict("MODEL-LOAD", probe.loads, True, text if probe.loads else probe.load_error,
                      "loads, with finite logits")  # fmt: skip
    if probe.trains is None:
        yield skipped("MODEL-TRAIN", "no forward pass was run")
    else:
        works = "backward pass works for every kind of block"
        yield verdict("MODEL-TRAIN", probe.trains, True,
                      works if probe.trains else f"{model.model_type}: {probe.train_error}",
                      "a gradient for every kind of block, causal attention")  # fmt: skip
    needed = f"less than the budget of {size(machine.memory_budget_bytes)}"
    yield verdict("MEM-STATIC", model.static_bytes < machine.memory_budget_bytes, must_fit(train),
                  f"weights {size(model.static_bytes)}", needed)  # fmt: skip


def tools_check(model: Path, module: str) -> Iterator[Check]:
    """Check that the calls of tools in validation rows are read back as they are, so that evaluate can score them.

    The engine's ``module`` reads them. Data without tools has no such check.
    """
    data = read_or_none(paths.DATA_REPORT, DataReport)
    if data is None or "tools" not in data.format:
        return
    try:
        refusal = run_json(module, [str(model)], TIMEOUT_SECONDS, room_bytes())["refusal"]
    except ChildFailed as error:
        refusal = str(error)
    text, needed = (
        refusal or "calls of tools in answers can be scored",
        "calls that are read back as they are in the rows",
    )
    yield verdict("TOOL-CALLS", not refusal, False, text, needed)


def must_fit(train: Train) -> bool:
    """Whether the base must fit into memory, because it may not stay on disk."""
    return train.method in WHOLE or train.stream_base is False


def _plan_checks(config: Pipeline, inputs: PlanInputs, module: str, say: Callable[[str], None]) -> Iterator[Check]:
    """Check that recommend_config's plan fits, by a cached or new dry run, and that the disk has room for it."""
    if not module and inputs.model.model_type not in FAMILIES:
        why = "the architecture is unknown; the dry run of recommend_config decides"
        yield from (skipped(each, why) for each in PLANNED)
        return
    try:
        plan = plan_run(inputs, config.train, config.lora, module, say)
    except (DataError, ModelError, MachineError) as error:
        yield from (skipped("DISK-FREE", "there is no plan"), from_error("MEM-FIT", error))
        return
    yield disk_check(paths.OUTPUT, plan.disk_bytes)
    yield fit_check(plan, by_dry_run=bool(module))


def fit_check(planned: Recommendation, *, by_dry_run: bool) -> Check:
    """Check that the training planned by recommend_config fits."""
    budget, margin, settings = planned.memory_budget, planned.margin_bytes, planned.settings
    process = budget.process_bytes
    text = f"{size(planned.predicted_peak_bytes + process)}{f' and a margin of {size(margin)}' if margin else ''}"
    text += f", {counted(settings.batch_size, 'row')} of {settings.max_seq_length} tokens (closed form)"
    if (measured := planned.measured) is not None:  # a process's footprint leaves out GPU memory
        taken_bytes = measured.footprint_bytes if planned.backend == "cpu" else measured.peak_bytes + process
        text += f"; measured in a dry run: {size(taken_bytes)}, of which mlx {size(measured.peak_bytes)}"
    if by_dry_run and not planned.verified:
        return skipped("MEM-FIT", f"no dry run was made; predicted {text}", critical=True)
    over = planned.predicted_peak_bytes + margin + process > budget.total_bytes and not planned.verified
    if over:
        text += "; the estimate is conservative, recommend_config's dry run decides"
    return verdict("MEM-FIT", not over, False, text, f"at most {size(budget.total_bytes)}")


# The self-test


def selftest(module: str, model: Path) -> list[tuple[str, str, bool]]:
    """Run one pass of ``model`` in a child, ``python -m module``, and return the results of ``judge``.

    Raises ModelError if the model cannot be trained, and MachineError if the child fails otherwise.
    """
    try:
        return judge(_one_pass(module, model))
    except ChildFailed as error:
        how, _, refusal = str(error).partition(": ")
        if how == f"exit code {ModelError.exit_code}":
            raise ModelError(refusal, where=model, do="use another model") from None
        do = "'safetrain preflight' checks the machine; if it ran out of memory, use a smaller model"
        raise MachineError(f"The self-test did not finish: {error}", where=model, do=do) from None


def _one_pass(module: str, model: Path) -> dict[str, Any]:
    return run_json(module, ["--pass", str(model), ROWS, TOKENS], TIMEOUT_SECONDS, room_bytes())


def judge(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Return name, text and verdict of each figure; one without a reference passes. A GPU may use TF32 (19 bits)."""
    limit = FLOAT32_TOLERANCE if found["on_cpu"] else TF32_TOLERANCE
    limit = limit if found["in_float32"] else SIXTEEN_BIT_TOLERANCE
    reference = f"(limit {limit:.0e}) from mlx-lm's layers and plain cross-entropy"
    layout = "packed, without padding" if found["packs_rows"] else "as padded rectangles"
    differences = [(name, found[f"{name}_difference"]) for name in ("loss", "gradient")]
    speed = f"{found['step_seconds']:.3f} s forward and backward, {found['tokens_per_second']:,.0f} tokens/s"
    return [
        *((name, f"differs by {size:.1e} {reference}", size <= limit) for name, size in differences),
        ("rows", f"computed {layout}; adapters on {found['layers_with_adapter']} layers", True),
        ("time", speed, True),
        ("memory", f"{size(found['peak_memory_bytes'])} at the peak", True),
    ]


def report_lines(module: str, model: Path) -> Iterator[str]:
    """Yield the report line by line: preflight's checks of the machine, and the results of ``judge``.

    If a child fails, its line says how, and the kind of error, but not the message, which may contain a path.
    """
    yield FENCE
    yield f"safetrain {version_of('safetrain')} selftest --report, {time.strftime('%Y-%m-%d')}"
    figures: dict[str, Callable[[], list[tuple[str, str, bool]]]] = {
        "MACHINE": lambda: _machine(Probe(**run_json(module, [], TIMEOUT_SECONDS, room_bytes()))),
        "TRAINING": lambda: judge(_one_pass(module, model)),
    }
    for label, measure in figures.items():
        try:
            results = measure()
        except ChildFailed as error:
            results = [(label, ": ".join(str(error).split(": ")[:2]), False)]
        for result in results:
            yield from textwrap.wrap(result_line(*result), 80, subsequent_indent=" " * 18)
    yield FENCE


def _machine(probe: Probe) -> list[tuple[str, str, bool]]:
    checks = [packages_check(), *engine_checks(read_machine_now(probe), probe), *environment_checks(0)]
    return [(check.id, check.found, check.status == PASS) for check in checks]


def result_line(name: str, text: str, passed: bool) -> str:
    """A result as a line for the terminal, like a check of preflight."""
    return f"{MARKS[PASS if passed else FAIL]} {name:<10} {text}"

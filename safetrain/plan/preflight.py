"""The checks before training: functions that turn facts into verdicts and change nothing."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from safetrain.core.data.training_rows import TrainingRows, load_training_rows, order_fingerprint
from safetrain.core.errors import ConfigError, DataError, MachineError, ModelError
from safetrain.core.formatting import counted
from safetrain.core.formatting import size_text as size
from safetrain.core.memory.system import own_limit_bytes
from safetrain.core.memory.terms import trained_parameters
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.model.shapes import is_known
from safetrain.core.records.hostfile import Hosts
from safetrain.core.records.reports import DataReport, Machine, read_data_report, require_data_of, require_source
from safetrain.core.records.run_state import RunIdentity, checkpoints_in, is_finished, read_postmortem, read_run_state
from safetrain.core.records.schema import PRETRAIN, Lora, Pipeline, Train
from safetrain.core.records.settings import Recommendation
from safetrain.core.storage import paths
from safetrain.core.storage.paths import FLIGHT, MARKER, POINTER
from safetrain.plan.candidates import PlanInputs, recommended_lora
from safetrain.plan.checks import (
    DEPENDENCIES,
    FAIL,
    PASS,
    WARN,
    Check,
    engine_checks,
    environment_checks,
    from_error,
    graded,
    skipped,
    software_checks,
    verdict,
)
from safetrain.plan.hosts import host_checks, is_shared, room_checks
from safetrain.plan.machine import Probe, ask_engine, read_machine_now, settle
from safetrain.plan.recommend import disk_bytes_of, plan_run

GIB = 2**30
IDS = (
    "PY-VERSION", *(f"DEP-{name.upper()}" for name in DEPENDENCIES), "HW-CHIP", "HW-RAM", "HW-GPU",
    "CPU-BLAS", "ENV-CGROUP", "ENV-ULIMIT", "ENV-SWAP", "MAC-POWER", "MAC-WATCHDOG", "DATA-FILES", "DATA-LENGTH",
    "MODEL-FILES", "MODEL-ARCH", "MODEL-LOAD", "MODEL-TRAIN", "MEM-STATIC", "MEM-FIT", "DISK-FREE", "RUN-PREV",
    "HOSTS-FILE", "HOSTS-REACHED", "HOSTS-EQUAL", "RANKS-CORES", "RANKS-ROOM",
)  # fmt: skip
SPARE_DISK_BYTES = GIB


def examine(
    config: Pipeline,
    folder: Path,
    before: Machine | None,
    probe_module: str,
    dry_run_module: str,
    say: Callable[[str], None],
) -> tuple[list[Check], Machine | None]:
    """Run all checks of preflight.level and read the machine, which is None if mlx does not work.

    ``folder`` is the model's, ``before`` the machine of the last preflight; the modules belong to the engine.
    """
    train, lora, level = config.train, config.lora, config.preflight.level
    checks = software_checks()
    model, model_found = _model(folder, level)
    probe, why_not = ask_engine(probe_module, model, level, own_limit_bytes(train.memory_limit_gb))
    data, rows, data_found = _data(config, model)
    last = [*model_found, *data_found, *environment_checks(model.static_bytes if model else 0)]
    last += [_disk_check(config, data, model), previous_run_check(paths.OUTPUT, _identity(model, rows))]
    hosts_found, hosts = host_checks(train, folder) if is_shared(train) else ([], None)
    last += hosts_found
    if probe is None:
        checks.append(Check("HW-GPU", "backend", FAIL, True, f"mlx does not work here: {why_not}", "mlx starts",
                            f"python -m {probe_module}", "run 'make clean && make'"))  # fmt: skip
        open_questions = ("HW-RAM", "MODEL-LOAD", "MODEL-TRAIN", "MEM-STATIC", "MEM-FIT")
        return [*checks, *last, *_open(open_questions, "mlx does not work")], None
    machine = settle(read_machine_now(probe), before)
    checks += [*engine_checks(machine, probe), *last]
    if model is None:
        checks += _open(("MODEL-LOAD", "MODEL-TRAIN", "MEM-FIT"), "the model is incomplete")
        return checks, machine
    checks += [load_check(probe, level), train_check(model, probe)]
    checks.append(static_check(model, machine))
    if data is None or rows is None or FAIL in (each.status for each in checks[-2:]):
        why = "the data is missing" if data is None else "the weights do not fit, or the model cannot be trained"
        return [*checks, skipped("MEM-FIT", "training fits", why, critical=checks[-2].status != FAIL)], machine
    module, inputs = dry_run_module if level == "certify" else "", PlanInputs(data, machine, model, rows)
    return [*checks, *_fit_checks(train, lora, inputs, module, say, hosts)], machine


def data_checks(report: DataReport, longest_allowed: int | None) -> list[Check]:
    """Check the number of rows in each split, and their lengths against the model's context."""
    reading = f"{report.train.rows} train, {report.valid.rows} valid, {report.test.rows} test rows from {report.source}"
    ok = min(report.train.rows, report.valid.rows, report.test.rows) > 0
    status = FAIL if not ok else WARN if report.warnings else PASS
    notes, source = "; ".join(report.warnings), "data_report.json"
    files = Check("DATA-FILES", "data", status, True, f"{reading}; {notes}" if notes else reading,
                  "at least one row in each", source,
                  "" if status == PASS else f"see checkpoints_qlora/{source}")  # fmt: skip
    lengths = report.train.lengths
    text = f"row length: median {lengths.p50} tokens, p99.5 {lengths.p99_5}, max {lengths.max}"
    short = longest_allowed is None or lengths.max <= longest_allowed
    longer = verdict("DATA-LENGTH", "row length", short, False, text, f"at most {longest_allowed} tokens",
                     "train.max_seq_length or the model's context",
                     "shorten the rows: longer ones are truncated")  # fmt: skip
    return [files, longer]


def model_checks(model: ModelFiles, level: str) -> list[Check]:
    """Check that the model is complete and its architecture known."""
    bits = f"{model.quantization_bits}-bit" if model.quantization_bits else "not quantized"
    files = f"{model.folder}: {model.model_type}, {model.parameters / 1e6:.1f}M parameters, {bits}, "
    is_known_shape = is_known(model.model_type)
    unknown = f"{model.model_type}: memory cannot be estimated; a dry run measures it"
    kind = model.model_type if is_known_shape else unknown
    return [
        Check("MODEL-FILES", "model complete", PASS, True, files + size(model.static_bytes), source="file headers"),
        verdict("MODEL-ARCH", "architecture", is_known_shape or level == "certify", False, kind,
                "a dense architecture with known shapes", "config.json",
                "use preflight.level=certify, which makes a dry run"),
    ]  # fmt: skip


def load_check(probe: Probe, level: str) -> Check:
    """Check that mlx-lm loads the model and that a forward pass works through each kind of block."""
    if probe.loads is None:
        why = "level quick does not load the model" if level == "quick" else "it is larger than the memory budget"
        return skipped("MODEL-LOAD", "model loads", why)
    text = f"loads in {probe.load_seconds:.1f} s, forward pass works (cached per model and installation)"
    text = text if probe.loads else probe.load_error
    return verdict("MODEL-LOAD", "model loads", probe.loads, True, text, "loads, with finite logits", "mlx-lm",
                   "use a model that mlx-lm supports, or fetch it again: safetrain fetch HUB_ID")  # fmt: skip


def train_check(model: ModelFiles, probe: Probe) -> Check:
    """Check that the model can be trained: some have kernels without gradients, or attention to later tokens."""
    if probe.trains is None:
        return skipped("MODEL-TRAIN", "model trains", "no forward pass was run")
    works = "backward pass works for every kind of block"
    text = works if probe.trains else f"{model.model_type}: {probe.train_error}"
    return verdict("MODEL-TRAIN", "model trains", probe.trains, True, text, "a gradient for each, causal attention",
                   "mlx-lm", "train a model of another family; a newer mlx-lm may train this one")  # fmt: skip


def static_check(model: ModelFiles, machine: Machine) -> Check:
    """Check that the weights fit the memory budget."""
    fits = model.static_bytes < machine.memory_budget_bytes
    return verdict("MEM-STATIC", "weights fit", fits, True, f"weights {size(model.static_bytes)}",
                   f"less than the budget of {size(machine.memory_budget_bytes)}", "file headers, machine.json",
                   "use a smaller or more strongly quantized model: safetrain estimate MODEL")  # fmt: skip


def fit_check(planned: Recommendation, *, by_dry_run: bool) -> Check:
    """Check that the training planned by recommend_config fits."""
    process, margin = planned.process_memory_bytes, planned.margin_bytes
    shape = f"{counted(planned.batch_size, 'row')} of {planned.max_seq_length} tokens"
    text = f"{size(planned.predicted_peak_bytes + process)}"
    text += f" and a margin of {size(margin)}" if margin else ""
    text += f", {shape} (closed form)"
    footprint, peak = planned.measured_footprint_bytes, planned.measured_peak_bytes
    if footprint is not None and peak is not None:  # a process's footprint leaves out GPU memory
        measured = footprint if planned.planned_backend == "cpu" else peak + process
        text += f"; measured in a dry run: {size(measured)}, of which mlx {size(peak)}"
    most = f"at most {size(planned.memory_budget_bytes)}"
    source = "the smaller of machine.json and train.memory_limit_gb"
    over = planned.predicted_peak_bytes + margin + process > planned.memory_budget_bytes and not planned.verified
    if by_dry_run and not planned.verified:
        return skipped("MEM-FIT", "training fits", f"no dry run was made; predicted {text}", critical=True)
    if over:
        text += "; the estimate is conservative, recommend_config's dry run decides"
    return Check("MEM-FIT", "training fits", WARN if over else PASS, not over, text, most, source)


def _disk_check(config: Pipeline, data: DataReport | None, model: ModelFiles | None) -> Check:
    if data is None or model is None:
        return skipped("DISK-FREE", "disk", "the needed space depends on the data and the model", critical=True)
    try:
        lora, _ = recommended_lora(data, model, config.lora)
        trained = trained_parameters(model, lora, config.train.method)
        return disk_check(paths.OUTPUT, disk_bytes_of(trained, config.train.keep_checkpoints))
    except ConfigError as error:
        return from_error("DISK-FREE", "disk", error)


def disk_check(folder: Path, needed_bytes: int) -> Check:
    """Check that the disk has room for these bytes."""
    free = shutil.disk_usage(folder).free
    needed = f"{size(needed_bytes)} for checkpoints and adapter, better {size(needed_bytes + SPARE_DISK_BYTES)}"
    return graded("DISK-FREE", "disk", free, (needed_bytes, needed_bytes + SPARE_DISK_BYTES), f"{size(free)} free",
                  needed, "trained weights and their checkpoints (train.keep_checkpoints)",
                  f"free some space: du -sh {folder}/*")  # fmt: skip


def previous_run_check(output: Path, planned: RunIdentity | None = None) -> Check:
    """Warn if the last training crashed and none has finished since.

    The check fails if ``planned`` cannot resume an unfinished run because model or rows differ: train would refuse it
    (exit code 7). The settings of ``planned`` are not compared.
    """
    return _other_run_check(output, planned) or _death_check(output)


def _other_run_check(output: Path, planned: RunIdentity | None) -> Check | None:
    state = read_run_state(output)
    if state is None or state.finished or planned is None or not checkpoints_in(output):
        return None
    identity = dataclasses.replace(planned, settings=state.identity.settings)
    differences = identity.differences(state.identity)
    if not differences:
        return None
    text = f"an unfinished run stopped at step {state.step}, and this one differs in: {', '.join(differences)}"
    return Check("RUN-PREV", "previous run", FAIL, True, text, "the same data and model, or no unfinished run", POINTER,
                 "safetrain discard (deletes that run), or use its data and model again")  # fmt: skip


def _death_check(output: Path) -> Check:
    source = "postmortem.json"
    if (output / FLIGHT / MARKER).is_file():
        return Check("RUN-PREV", "previous run", WARN, False, "a training run ended suddenly and was not diagnosed",
                     "", source, "safetrain diagnose")  # fmt: skip
    death, pointer = read_postmortem(output), output / POINTER
    # training_state.json is not an output of DVC, so its time is that of the last training run
    finished_since = death is not None and is_finished(output) and pointer.stat().st_mtime > death.ended_seconds
    if death is None or finished_since:
        return Check("RUN-PREV", "previous run", PASS, False, "no crash since the last finished run", source=source)
    ended = "was stopped" if death.cause == "stopped" else "died"
    text = f"the last training {ended} at step {death.step}: {death.title}"
    return Check("RUN-PREV", "previous run", WARN, False, text, "", source, death.next_command or "safetrain diagnose")


def _model(folder: Path, level: str) -> tuple[ModelFiles | None, list[Check]]:
    """Read the model's files; if they are incomplete, return a failed check."""
    try:
        model = read_model_files(folder)
    except ModelError as error:
        return None, [from_error("MODEL-FILES", "model complete", error)]
    return model, model_checks(model, level)


def _data(config: Pipeline, model: ModelFiles | None) -> tuple[DataReport | None, TrainingRows | None, list[Check]]:
    """Read the data report and the rows; if validate_data has not run or found no rows, return a failed check."""
    try:
        if not paths.DATA_REPORT.is_file():
            require_source(config.data.path)
        data = read_data_report(paths.DATA_REPORT)
        require_data_of(data, config.data.path)
        rows = load_training_rows(model.folder, config.train.max_examples) if model else None
    except (ConfigError, DataError) as error:
        return None, None, [from_error("DATA-FILES", "data", error)]
    limits = [config.train.max_seq_length, model.max_positions if model else None]
    if config.train.method == PRETRAIN:  # windows truncate nothing
        limits = []
    return data, rows, data_checks(data, min((limit for limit in limits if limit), default=None))


def _identity(model: ModelFiles | None, rows: TrainingRows | None) -> RunIdentity | None:
    """Identity of the planned training; None if model or rows are missing."""
    if model is None or rows is None:
        return None
    return RunIdentity(model.fingerprint, rows.train_digest, rows.valid_digest, "", order_fingerprint())


def _fit_checks(
    train: Train, lora: Lora, inputs: PlanInputs, module: str, say: Callable[[str], None], hosts: Hosts | None
) -> Iterator[Check]:
    """Check by a cached or new dry run that recommend_config's plan fits, also with several ranks."""
    is_known_shape = is_known(inputs.model.model_type)
    if is_known_shape or module:
        try:
            plan = plan_run(inputs, train, lora, module, say)
            yield fit_check(plan, by_dry_run=bool(module))
        except (ConfigError, DataError, ModelError, MachineError) as error:
            yield from_error("MEM-FIT", "training fits", error)
    else:
        yield skipped(
            "MEM-FIT", "training fits", "the architecture is unknown; the dry run of recommend_config decides"
        )
    try:
        yield from room_checks(hosts, inputs, train, lora) if hosts and is_known_shape else ()
    except ConfigError as error:
        yield from_error("RANKS-ROOM", "memory for ranks", error)


def _open(identifiers: Sequence[str], why: str) -> list[Check]:
    """Skip checks that this level requires but an earlier failure prevents."""
    return [skipped(identifier, identifier, why, critical=True) for identifier in identifiers]

"""Plans a training on measurements: the recommendation, and what the model itself takes at the longest rows."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from safetrain.core.memory import PROCESS_BYTES
from safetrain.core.memory_terms import FLOAT32, padded, trained_parameters, usable_cores
from safetrain.core.model_files import ModelFiles
from safetrain.core.reports import DataReport, Machine
from safetrain.core.schema import Lora, Train
from safetrain.core.settings import LoraSettings, Recommendation
from safetrain.plan.calibration import Calibration, Mode
from safetrain.plan.measure import Bench, calibration_for, certify, settings_of, template
from safetrain.plan.recommend import recommend

MOST_CANDIDATES = 8


@dataclass(frozen=True)
class Facts:
    """What a plan is made from."""

    data: DataReport
    machine: Machine
    model: ModelFiles


def bench_of(machine: Machine, module: str, say: Callable[[str], None]) -> Bench:
    """What this machine's measurements are made and remembered with."""
    chip = f"{machine.chip} {machine.physical_cores} {machine.backend} {machine.device} {usable_cores()}"
    return Bench(module, chip, say)


def plan_measured(facts: Facts, train: Train, lora: Lora, bench: Bench) -> Recommendation:
    """The recommendation by what a shortened model has shown here; raises as ``recommend`` does."""
    return _plan(facts, train, lora, bench, frozenset())


def plan_certified(facts: Facts, train: Train, lora: Lora, bench: Bench) -> Recommendation:
    """The first recommendation that the model itself, measured at the longest rows, bears out.

    Not ``verified`` where what was asked for with train.oversize does not fit, or after eight that were not borne out.
    """
    rejected: set[tuple[int, int, Mode]] = set()
    for _ in range(MOST_CANDIDATES):
        chosen = _plan(facts, train, lora, bench, frozenset(rejected))
        if chosen.predicted_peak_bytes + PROCESS_BYTES > chosen.memory_budget_bytes:
            return chosen  # with train.oversize: to measure it could take the machine down
        measured, ended = _measured(chosen, facts, train, bench)
        if measured is not None and measured.verified:
            return measured
        if measured is not None:
            ended = f"{(measured.measured_peak_bytes or 0) / 2**30:.2f} GiB, more than the memory budget"
        bench.say(f"{chosen.batch_size} rows of {chosen.max_seq_length} tokens: {ended}")
        mode = Mode(chosen.gradient_checkpointing, chosen.dequantize_base)
        rejected.add((chosen.batch_size, chosen.max_seq_length, mode))
    return _plan(facts, train, lora, bench, frozenset(rejected))


def _plan(
    facts: Facts, train: Train, lora: Lora, bench: Bench, rejected: frozenset[tuple[int, int, Mode]]
) -> Recommendation:
    def calibrate(adapter: LoraSettings, mode: Mode) -> Calibration | None:
        return calibration_for(bench, facts.model, template(train.method, adapter), mode)

    return recommend(facts.data, facts.machine, facts.model, train, lora, calibrate, rejected)


def _measured(chosen: Recommendation, facts: Facts, train: Train, bench: Bench) -> tuple[Recommendation | None, str]:
    """The recommendation with what the model itself took, or how the measuring process ended."""
    settings = settings_of(chosen, template(train.method, chosen.lora))
    best = FLOAT32 * trained_parameters(facts.model, chosen.lora, train.method)  # which a training keeps, a probe not
    limit = chosen.predicted_peak_bytes - best
    measured, ended = certify(bench, facts.model, settings, padded(chosen.max_seq_length - 1), limit)
    if measured is None:
        return None, ended
    peak, process = measured.peak_bytes + best, measured.footprint_bytes + best
    fits = (process if facts.machine.backend == "cpu" else peak) <= chosen.memory_budget_bytes
    return dataclasses.replace(chosen, measured_peak_bytes=peak, measured_footprint_bytes=process, verified=fits), ""

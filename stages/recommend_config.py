"""Stage 3: choose the configuration for this data, model and machine, measure it, and write it with its reasons."""

import dataclasses
from pathlib import Path

from safetrain.core import paths
from safetrain.core.lock import require_no_training
from safetrain.core.memory import FLOAT32, padded, trained_parameters, usable_cores
from safetrain.core.model_files import ModelFiles, read_model_files
from safetrain.core.reports import read_data_report, read_machine
from safetrain.core.schema import Pipeline
from safetrain.core.settings import LoraSettings, Recommendation, write_recommendation
from safetrain.plan.calibration import Calibration, Mode
from safetrain.plan.measure import Bench, calibration_for, certify, settings_of, template
from safetrain.plan.recommend import recommend
from stages.config import stage

PROBE = "safetrain.engine.calibrate"
MOST_CANDIDATES = 4
GIB = 2**30


@stage
def main(config: Pipeline) -> None:
    """Recommend what params.yaml leaves open."""
    require_no_training(paths.OUTPUT)
    model = read_model_files(Path(config.model.path))
    recommendation = choose(config, model)
    write_recommendation(paths.RECOMMENDED_CONFIG, recommendation)
    show(recommendation)


def choose(config: Pipeline, model: ModelFiles) -> Recommendation:
    """The first recommendation that the model itself, measured at the longest rows, bears out."""
    data, machine, train = read_data_report(paths.DATA_REPORT), read_machine(paths.MACHINE), config.train
    device = f"{machine.chip} {machine.physical_cores} {machine.backend} {machine.device} {usable_cores()}"
    bench = Bench(PROBE, device, say)

    def calibrate(lora: LoraSettings, mode: Mode) -> Calibration | None:
        return calibration_for(bench, model, template(train.method, lora), mode)

    rejected: set[tuple[int, int, Mode]] = set()
    chosen = recommend(data, machine, model, train, config.lora, calibrate)
    for _ in range(MOST_CANDIDATES):
        settings = settings_of(chosen, template(train.method, chosen.lora))
        measured, ended = certify(bench, model, settings, padded(chosen.max_seq_length - 1))
        best = FLOAT32 * trained_parameters(model, chosen.lora, train.method)  # which a training keeps, a probe not
        if measured is not None:
            peak, process = measured.peak_bytes + best, measured.footprint_bytes + best
            if (process if machine.backend == "cpu" else peak) <= machine.memory_budget_bytes:
                return dataclasses.replace(
                    chosen, measured_peak_bytes=peak, measured_footprint_bytes=process, verified=True
                )
        say(f"{chosen.batch_size} rows of {chosen.max_seq_length} tokens: {ended or 'more than the memory budget'}")
        mode = Mode(chosen.gradient_checkpointing, chosen.dequantize_base)
        rejected.add((chosen.batch_size, chosen.max_seq_length, mode))
        chosen = recommend(data, machine, model, train, config.lora, calibrate, frozenset(rejected))
    return chosen


def show(recommendation: Recommendation) -> None:
    """Every value with its reason, and what it will take."""
    for reason in recommendation.reasons:
        section, _, key = reason.key.rpartition(".")
        value = getattr(recommendation.lora if section else recommendation, key)
        shown = ", ".join(value) if isinstance(value, tuple) else value
        say(f"{reason.key:<22} {shown!s:<12} {reason.text}")
    peak, budget = recommendation.predicted_peak_bytes / GIB, recommendation.memory_budget_bytes / GIB
    say(f"predicted peak {peak:.2f} GiB of {budget:.1f} GiB ({recommendation.basis})")
    if recommendation.measured_peak_bytes is not None:
        measured = recommendation.measured_peak_bytes
        error = 100 * (recommendation.predicted_peak_bytes / measured - 1)
        say(f"measured {measured / GIB:.2f} GiB with the model itself; the prediction is {error:+.1f} % off")
    else:
        say("not certified: no configuration was measured with the model itself")
    if recommendation.total_seconds is not None:
        say(f"about {recommendation.step_seconds:.2f} s an update, {recommendation.total_seconds / 60:.1f} min in all")


def say(text: str) -> None:
    """To the terminal, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    main()

"""Stage 3: choose the configuration for this data, model and machine, and write it with its reasons."""

from pathlib import Path

from safetrain.core import paths
from safetrain.core.lock import require_no_training
from safetrain.core.model_files import read_model_files
from safetrain.core.reports import read_data_report, read_machine
from safetrain.core.schema import Pipeline
from safetrain.core.settings import write_recommendation
from safetrain.plan.recommend import recommend
from stages.config import stage


@stage
def main(config: Pipeline) -> None:
    """Recommend what params.yaml leaves open."""
    require_no_training(paths.OUTPUT)
    recommendation = recommend(
        read_data_report(paths.DATA_REPORT),
        read_machine(paths.MACHINE),
        read_model_files(Path(config.model.path)),
        config.train,
        config.lora,
    )
    write_recommendation(paths.RECOMMENDED_CONFIG, recommendation)
    for reason in recommendation.reasons:
        section, _, key = reason.key.rpartition(".")
        value = getattr(recommendation.lora if section else recommendation, key)
        shown = ", ".join(value) if isinstance(value, tuple) else value
        print(f"{reason.key:<22} {shown!s:<12} {reason.text}")
    peak, budget = recommendation.predicted_peak_bytes / 2**30, recommendation.memory_budget_bytes / 2**30
    print(f"predicted peak {peak:.2f} GiB of {budget:.1f} GiB (closed form, not measured)")


if __name__ == "__main__":
    main()

"""Stage 6: draw loss.png, learning_rate.png and memory_usage.png from the metrics of the training."""

from safetrain.core.records.metrics import read_csv
from safetrain.core.records.schema import Pipeline
from safetrain.core.records.settings import read_recommendation
from safetrain.core.storage import paths
from safetrain.watch.plots import draw_learning_rate, draw_loss, draw_memory
from stages.config import stage


@stage
def main(_config: Pipeline) -> None:
    """Three pictures in checkpoints_qlora/plots."""
    records = read_csv(paths.METRICS_CSV)
    plan = read_recommendation(paths.RECOMMENDED_CONFIG)
    draw_loss(records, paths.PLOTS / "loss.png")
    draw_learning_rate(records, paths.PLOTS / "learning_rate.png")
    memory = paths.PLOTS / "memory_usage.png"
    draw_memory(records, plan.predicted_peak_bytes, plan.memory_budget_bytes, memory)
    print(f"pictures in {paths.PLOTS}: loss.png, learning_rate.png, memory_usage.png")


if __name__ == "__main__":
    main()

"""Stage 6: draw the training (loss.png, learning_rate.png, memory_usage.png) and its rows (row_lengths.png)."""

from safetrain.core.records.metrics import read_csv
from safetrain.core.records.reports import read_data_report, read_run_shape
from safetrain.core.records.schema import Pipeline
from safetrain.core.records.settings import Recommendation, read_recommendation
from safetrain.core.storage import paths
from safetrain.watch.plots import draw_learning_rate, draw_loss, draw_memory, draw_row_lengths
from safetrain.watch.trackers.export import export_apart
from stages.config import stage


@stage
def main(config: Pipeline) -> None:
    """Four pictures in checkpoints_qlora/plots."""
    records = read_csv(paths.METRICS_CSV)
    plan = read_recommendation(paths.RECOMMENDED_CONFIG)
    draw_loss(records, paths.PLOTS / "loss.png")
    draw_learning_rate(records, paths.PLOTS / "learning_rate.png")
    memory = paths.PLOTS / "memory_usage.png"
    draw_memory(records, plan.predicted_peak_bytes, plan.memory_budget_bytes, memory)
    data = read_data_report(paths.DATA_REPORT)
    draw_row_lengths(data, _max_seq_length(config, plan), paths.PLOTS / "row_lengths.png")
    print(f"pictures in {paths.PLOTS}: loss.png, learning_rate.png, memory_usage.png, row_lengths.png")
    if config.watch.export is not None:
        print(export_apart(config.watch.export))


def _max_seq_length(config: Pipeline, plan: Recommendation) -> int:
    """That the training ended with; a running one has no summary yet."""
    if paths.SUMMARY.exists():
        return read_run_shape(paths.SUMMARY).max_seq_length
    return config.train.max_seq_length or plan.max_seq_length


if __name__ == "__main__":
    main()

"""Stage 6: the report (report.html), and its pictures by themselves: checkpoints_qlora/plots, as PNG and SVG."""

from pathlib import Path

from safetrain.core.records.metrics import read_csv
from safetrain.core.records.reports import read_data_report
from safetrain.core.records.schema import Pipeline
from safetrain.core.records.settings import read_recommendation
from safetrain.core.storage import paths
from safetrain.watch import plots
from safetrain.watch.report_page.endings_shown import continuations
from safetrain.watch.report_page.rendering import write_report
from safetrain.watch.report_page.run_records import FolderFiles, read_records
from safetrain.watch.report_page.training_shown import predicted_peak
from safetrain.watch.trackers import export_apart
from stages.config import stage


@stage
def main(config: Pipeline) -> None:
    """One page, and six pictures."""
    run = read_records(FolderFiles(Path()))
    write_report(run, paths.REPORT)
    print(f"the report: {paths.REPORT}")
    steps = run.steps or read_csv(paths.METRICS_CSV)  # which says what is missing
    plan = read_recommendation(paths.RECOMMENDED_CONFIG)
    plots.draw_loss(run.recorded, paths.PLOTS / "loss.png", [mark.value for mark in continuations(run)])
    plots.draw_learning_rate(steps, paths.PLOTS / "learning_rate.png")
    plots.draw_memory(steps, predicted_peak(run), plan.memory_budget_bytes, paths.PLOTS / "memory_usage.png")
    plots.draw_speed(run.recorded, paths.PLOTS / "speed.png")
    ended_with = run.summary.settings.max_seq_length if run.summary is not None else None  # None: it still runs
    length = ended_with or config.train.max_seq_length or plan.max_seq_length
    plots.draw_row_lengths(read_data_report(paths.DATA_REPORT), length, paths.PLOTS / "row_lengths.png")
    for stale in paths.PLOTS.glob("evaluation.*"):  # of an adapter that is no longer there
        stale.unlink()
    if run.evaluation is not None:
        plots.draw_evaluation(run.evaluation, paths.PLOTS / "evaluation.png")
    names = ", ".join(sorted(path.name for path in paths.PLOTS.glob("*.png")))
    print(f"its pictures in {paths.PLOTS}: {names}; and as SVG")
    if config.watch.export is not None:
        print(export_apart(config.watch.export))


if __name__ == "__main__":
    main()

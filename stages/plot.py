"""Stage 6: write report.html, and its charts as PNG files to checkpoints_qlora/plots."""

from safetrain.core.records.metrics import read_csv
from safetrain.core.records.reports import read_data_report
from safetrain.core.records.schema import Pipeline
from safetrain.core.records.settings import read_recommendation
from safetrain.core.run_folder import read_run
from safetrain.core.storage import paths
from safetrain.stage import stage
from safetrain.watch.charts import pictures, write_pictures
from safetrain.watch.report import write_report


@stage
def main(config: Pipeline) -> None:
    """Write the report and its charts."""
    run = read_run()
    write_report(run, paths.REPORT)
    print(f"Report: {paths.REPORT}")
    for record, path, read in (
        (run.steps, paths.METRICS_CSV, read_csv),
        (run.plan, paths.RECOMMENDED_CONFIG, read_recommendation),
        (run.data, paths.DATA_REPORT, read_data_report),
    ):
        if not record:
            read(path)  # raises an error with what to do
    drawn = pictures(run)
    write_pictures(drawn, paths.PLOTS)
    print(f"Pictures: {len(drawn)} in {paths.PLOTS}")


if __name__ == "__main__":
    main()

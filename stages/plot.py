"""Stage 6: write report.html, and its charts as PNG files to checkpoints_qlora/plots."""

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import written_again
from safetrain.core.records.schema import Pipeline
from safetrain.core.storage import paths
from safetrain.stage import stage
from safetrain.watch.charts import pictures, write_pictures
from safetrain.watch.report import write_report
from safetrain.watch.run_folder import read_run


@stage
def main(config: Pipeline) -> None:
    """Write the report and its charts."""
    run = read_run()
    write_report(run, paths.REPORT)
    print(f"Report: {paths.REPORT}")
    records = {paths.METRICS_CSV: run.steps, paths.RECOMMENDED_CONFIG: run.plan, paths.DATA_REPORT: run.data}
    for path in (path for path, record in records.items() if not record):
        raise ConfigError(f"{path.name} is missing or cannot be read.", where=path, do=written_again())
    drawn = pictures(run)
    write_pictures(drawn, paths.PLOTS)
    print(f"Pictures: {len(drawn)} in {paths.PLOTS}")


if __name__ == "__main__":
    main()

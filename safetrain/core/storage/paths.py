"""Where the pipeline's files are, relative to the project's root. dvc.yaml names the same places."""

from pathlib import Path

VALIDATED = Path("data/validated")
OUTPUT = Path("checkpoints_qlora")
DATA_REPORT = OUTPUT / "data_report.json"
MACHINE = OUTPUT / "machine.json"
PREFLIGHT_REPORT = OUTPUT / "preflight_report.json"
RECOMMENDED_CONFIG = OUTPUT / "recommended_config.json"
ADAPTERS = OUTPUT / "adapters"
METRICS_JSON = OUTPUT / "training_metrics.json"
METRICS_CSV = OUTPUT / "training_metrics.csv"
SUMMARY = OUTPUT / "training_summary.json"
EVALUATION = OUTPUT / "evaluation.json"
PLOTS = OUTPUT / "plots"
REPORT = OUTPUT / "report.html"


def shipped(name: str) -> Path:
    """A file or folder that comes with the program: from the repository, or from the installed package."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "project"
    return (installed if installed.is_dir() else package.parent) / name

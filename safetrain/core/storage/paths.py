"""Where the pipeline's files are, relative to the project's root. dvc.yaml names the same places."""

from pathlib import Path

VALIDATED = Path("data/validated")
SCORE = Path("conf/score")  # checkers and schemas: DVC sees their changes
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
# Names in the run's folder
UNFINISHED, KEPT = "unfinished", "last_result"  # a run's own results until it finishes; links to finished ones
BEST_ADAPTER = OUTPUT / UNFINISHED / ADAPTERS.name
SEARCH = OUTPUT / "search"  # a folder for each candidate, like OUTPUT
POINTER = "training_state.json"
CHECKPOINTS = "checkpoint_epoch_*_step_*"
BAD_UPDATES = "bad_updates"
FLIGHT = "flight"  # recorder, stacks, job: of the last training process
ROW_LOSSES = "row_losses.npy"  # of a search's candidate, after the step of a validation and "_"
STANDINGS = "search.json"  # in SEARCH
REFERENCES = "reference.safetensors"  # DPO: the first log-probabilities of all rows, 4 bytes each
JOB, RECORDER, STACKS, MARKER = "job.json", "recorder.bin", "stacks.txt", "run.json"  # in FLIGHT
JOURNAL = "journal.jsonl"  # in FLIGHT: events of this training run and earlier attempts, for people
ERROR = "error.txt"  # in FLIGHT: the traceback of a library's error that we report in our words
POSTMORTEM = "postmortem.json"
LADDER = "memory_ladder.json"
REPLACED = ".*-old-*"  # an old folder during its replacement (files.replace_directory)
HALF_WRITTEN = (".checkpoint*", ".adapter*", ".*.partial*")
DAMAGED = "damaged_"  # in front of a checkpoint's name
TEMPORARY, KEPT_RUNS = (".dvc", "tmp", "exps"), Path(".dvc/tmp/safetrain")


def kept_runs(project: Path) -> Path | None:
    """Where a queued or temporary experiment keeps its checkpoints, by its folder ``project``; None for a plain run.

    DVC runs such an experiment in a copy of the project below TEMPORARY, and deletes that when a stage fails.
    """
    places = (place for place in project.parents if place.parts[-3:] == TEMPORARY)
    return next((place.parents[2] / KEPT_RUNS for place in places), None)


def shipped(name: str) -> Path:
    """Find a file or folder that comes with the program, in the repository or the installed package."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "project"
    return (installed if installed.is_dir() else package.parent) / name


def rank_folder(flight: Path, rank: int) -> Path:
    """Return a rank's flight folder; rank 0 uses ``flight`` itself."""
    return flight / f"rank_{rank}" if rank else flight

"""The files of an unfinished run, by name: enough to throw them away without opening them."""

import shutil
from pathlib import Path

POINTER = "training_state.json"
CHECKPOINTS = "checkpoint_epoch_*_step_*"
BAD_UPDATES = "bad_updates"
FLIGHT = "flight"  # recorder, stacks, job: of the last training process
JOB, RECORDER, STACKS, MARKER = "job.json", "recorder.bin", "stacks.txt", "run.json"  # in there
JOURNAL = "journal.jsonl"  # there too: what happened in this training and the ones before, for people
ERROR = "error.txt"  # there too: the traceback of a library's error that was reported in our words
POSTMORTEM = "postmortem.json"
LADDER = "memory_ladder.json"
SAMPLES = "samples.jsonl"  # what a model that is trained from scratch has written
REPLACED = ".*-old-*"  # a folder whose new version is being put in its place (files.replace_directory)
HALF_WRITTEN = (".checkpoint*", ".adapter*", ".*.partial*")
DAMAGED = "damaged_"  # in front of a checkpoint's name


def rank_folder(flight: Path, rank: int) -> Path:
    """The flight folder of one of several ranks; rank 0 has that of the training."""
    return flight / f"rank_{rank}" if rank else flight


def remove_half_written(output: Path) -> None:
    """Remove what a killed process has left; only while no other works in ``output``.

    A folder that was being replaced, and is not there under its own name, gets that back.
    """
    for old in output.glob(REPLACED):
        own = output / old.name[1:].rpartition("-old-")[0]
        if not own.exists() and any(old.iterdir()):
            old.rename(own)
    for path in (path for pattern in HALF_WRITTEN for path in output.glob(pattern)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def discard_run(output: Path, *, damaged_too: bool = False) -> int:
    """Remove the pointer, all checkpoints, bad updates, what a killed process left half written.

    Returns how many checkpoints. Damaged ones stay for inspection, unless the caller removes them.
    """
    (output / POINTER).unlink(missing_ok=True)
    (output / LADDER).unlink(missing_ok=True)
    remove_half_written(output)
    checkpoints = list(output.glob(CHECKPOINTS))
    for folder in [*checkpoints, *(output.glob(DAMAGED + CHECKPOINTS) if damaged_too else ())]:
        shutil.rmtree(folder)
    shutil.rmtree(output / BAD_UPDATES, ignore_errors=True)
    return len(checkpoints)

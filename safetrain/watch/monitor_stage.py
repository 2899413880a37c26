"""Which stage of the pipeline runs in a folder, asked of the system: its processes say it."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from safetrain.watch.monitor_records import StageRuns

PIPELINES = (("dvc", "repro"), ("exp", "run"), ("safetrain", "run"))


def stage_here(project: Path, wall_seconds: float) -> StageRuns | None:
    """The stage that runs in ``project``, by the command and the folder of its process; None where none does."""
    between = None
    for process in psutil.process_iter():
        try:
            name = stage_of(process.cmdline())
            if name is None or Path(process.cwd()) != project:
                continue
            found = StageRuns(name, max(0.0, wall_seconds - process.create_time()))
        except (psutil.Error, OSError):  # gone meanwhile, or somebody else's
            continue
        if name:
            return found
        between = found
    return between


def stage_of(words: Sequence[str]) -> str | None:
    """The stage that a command is, ``""`` for one that runs all of them, None for any other."""
    for word, following in pairwise(words):
        if word == "-m" and following.startswith("stages."):
            return following.removeprefix("stages.")
    is_pipeline = any((Path(word).name, following) in PIPELINES for word, following in pairwise(words))
    return "" if is_pipeline else None

"""`safetrain search` beside the full grid and beside a random search of equal steps; and how it takes kills.

    python -m benchmarks.bench_search [example] [pairs] [91M] [kills]

A search of eight candidates with the command, then its losers are trained to the end too, which makes the grid. Random
search: as many whole runs as the search's steps pay for, drawn from the grid; the mean over all draws.
"""

import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import show_result, write_result
from benchmarks.throughput_cases import MIDDLE
from safetrain.core.records.search import WAITING, Search
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_record, sha256_of
from safetrain.runs import jobs_of
from safetrain.search import Searching
from safetrain.search_plan import planned_search
from tests.support.random_models import build_model

SAFETRAIN, MINUTES, KILLS = [sys.executable, "-m", "safetrain.cli"], 5, 40
SEARCH = ["search", "--minutes", str(MINUTES)]
FEW = ("evaluate.max_examples=8", "preflight.level=quick")
CASES: dict[str, tuple[int, int, tuple[str, ...]]] = {  # seeds, steps, values
    "example": (10, 104, ("train.learning_rate=1e-4,4e-4,1.3e-3,4e-3", "lora.rank=8,16", "train.eval_steps=13")),
    "pairs": (10, 80, ("train.method=dpo", "data.path=data/preferences.jsonl", "train.eval_steps=10",
                       "train.learning_rate=1e-4,4e-4,1e-3,4e-3", "lora.rank=4,16")),
    "91M": (2, 16, ("model.path=models/middle", "train.learning_rate=1e-5,1e-4,4e-4,2e-3", "lora.rank=8,16",
                    "train.eval_steps=2")),
}  # fmt: skip
SWEPT = ("train.learning_rate=", "lora.rank=")
HEADER = [
    "runs", "seed", "found", "its loss", "best of the grid", "behind it by (95 %)", "steps, of 2.5 N", "ties",
    "search, s", "grid, s", "random search of equal steps: mean loss",
]  # fmt: skip


def main(wanted: list[str]) -> None:
    """One table, and a line about kills."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["SAFETRAIN_LOCK_DIR"] = scratch
        project = Path(scratch) / "project"
        subprocess.run([*SAFETRAIN, "init", str(project), "--example"], check=True, capture_output=True)
        if "91M" in wanted or not wanted:
            build_model(project / "models/middle", **MIDDLE)  # type: ignore[arg-type]
        rows = [row for name in CASES if name in wanted or not wanted for row in compared(project, name)]
        notes = [killed(project)] if "kills" in wanted or not wanted else []
    (show_result if wanted else write_result)("bench_search", "A search beside a grid", HEADER, rows, notes)


def compared(project: Path, name: str) -> list[list[Any]]:
    """A row for each seed; the first has times, and is searched by the command."""
    seeds, steps, values = CASES[name]
    words, rows = [*values, *FEW, f"train.max_steps={steps}"], list[list[Any]]()
    for seed in range(seeds):
        times = [seconds_of(project, command, [*words, "train.seed=0"]) for command in (["run"], SEARCH) if not seed]
        found = searched(project, [*words, f"train.seed={seed}"])
        with chdir(project):
            states = [replace(each, state=WAITING, losses=()) for each in found.candidates]
            whole = replace(found, candidates=tuple(states), rungs=(1.0,), rung=0, best="", minutes=1000)
            grid = Searching(whole, ignore).go()
        losses = {each.name: each.losses[-1][1] for each in grid.candidates}
        mine, first = (next(e for e in grid.candidates if e.name == each) for each in (found.best, grid.best))
        behind = "0" if mine is first else f"{mine.behind_by:.4f} ± {mine.plus_minus:.4f}"
        values_of_best = " ".join(each.partition(".")[2] for each in mine.values if each.startswith(SWEPT))
        computed = sum(each.steps for each in found.candidates)
        draws = itertools.combinations(losses.values(), max(1, computed // steps))
        rows.append([
            name, seed, values_of_best, f"{losses[mine.name]:.3g}", f"{losses[grid.best]:.3g}", behind,
            f"{computed} of {2.5 * mine.total_steps:.0f}", found.steps_for_ties,
            *(f"{each:.0f}" for each in reversed(times)), *([""] * (2 - len(times))),
            f"{statistics.mean(map(min, draws)):.3g}",
        ])  # fmt: skip
        print(rows[-1], flush=True)
        forget(project)
    return rows


def seconds_of(project: Path, command: list[str], words: list[str]) -> float:
    """Time of a command of safetrain: a search, or whole runs of all candidates, each with its evaluation."""
    began = time.monotonic()
    done = subprocess.run([*SAFETRAIN, *command, *words], cwd=project, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    seconds = time.monotonic() - began
    forget(project)
    return seconds


def ignore(*_event: object) -> None: ...


def searched(project: Path, words: list[str]) -> Search:
    """A search in this process, without the stages before and after it."""
    with chdir(project):
        return Searching(planned_search(words, jobs_of(words), MINUTES, "loss", time.monotonic()), ignore).go()


def forget(project: Path) -> None:
    subprocess.run([*SAFETRAIN, "discard"], cwd=project, check=True, capture_output=True)
    subprocess.run(["git", "checkout", "-q", "params.yaml"], cwd=project, check=True)
    for name in ("dvc.lock", ".dvc/cache"):
        shutil.rmtree(project / name, ignore_errors=True)
        (project / "dvc.lock").unlink(missing_ok=True)


def killed(project: Path) -> str:
    """Kill a search again and again, in every phase, until KILLS have hit it; it ends with the same bits."""
    _, steps, values = CASES["example"]
    words, adapter, hits = (
        [*values, *FEW, f"train.max_steps={steps}"],
        project / paths.ADAPTERS / "adapters.safetensors",
        0,
    )
    ends = set[str]()
    phases, rounds, hits, source = dict[str, int](), 0, 0, random.Random(0)
    while hits < KILLS or not rounds:
        forget(project)
        while rounds and hits < KILLS:
            process = subprocess.Popen([*SAFETRAIN, *SEARCH, *words], cwd=project, start_new_session=True,
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
            try:
                process.wait(source.uniform(1, 20))
                break
            except subprocess.TimeoutExpired:
                record = project / paths.SEARCH / paths.STANDINGS
                told = json.loads(record.read_text()) if record.is_file() else {}
                states = [each["state"] for each in told.get("candidates", ())]
                phase = "after" if told.get("best") else "training" if "training" in states else "before, between"
                phases[phase] = phases.get(phase, 0) + 1
                hits += 1
                (os.killpg if hits % 2 else os.kill)(process.pid, signal.SIGKILL)
                process.wait()
        subprocess.run([*SAFETRAIN, *SEARCH, *words], cwd=project, check=True, capture_output=True)
        found, rounds = read_record(project / paths.SEARCH / paths.STANDINGS, Search), rounds + 1
        ends.add(sha256_of(adapter) + repr([(each.name, each.losses) for each in found.candidates]))
    how = "the same losses and bits each time" if len(ends) == 1 else f"{len(ends)} different ends"
    return f"{hits} kills of process or group in {rounds - 1} searches ({phases}), and one without: {how}."


if __name__ == "__main__":
    main(sys.argv[1:])

"""Ends one of two ranks of a training in every way there is, and continues.

``python -m benchmarks.bench_chaos_ranks [--kills 60] [--seed 1]``

Each time the verdict must name the rank, no process may be left after five seconds, and what the same command
continues must come to what a training of two ranks comes to that nobody disturbed.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Iterator

from benchmarks.machine import write_result
from tests.support.chaos.chains import make_reference
from tests.support.chaos.disk import can_mount, full_then_room, small_disk
from tests.support.chaos.ending import Ending, Ground
from tests.support.chaos.project import EVAL_STEPS, SAVE_STEPS, UPDATES, Project, scratch_folder
from tests.support.chaos.ranks import (
    RANKS,
    SIGNALS,
    RankOutcome,
    hang,
    one_without_room,
    run_kills,
    stopped_and_continued,
    through_mlx_launch,
)


def main() -> None:
    """Both tables; ends with 1 when anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60, help="at least so many")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    with scratch_folder() as folder:
        project = Project(folder / "main", train={"ranks": RANKS})
        project.plan()
        ground = Ground(project, make_reference(project), folder, random.Random(asked.seed))
        say("the training that nobody disturbs is made, twice alike")
        endings = []
        for ending in staged(ground):
            endings.append(ending)
            say(f"{ending.what}: {ending.skipped or ending.verdict}; {ending.resumed}; {ending.faults or 'right'}")
        outcomes = run_kills(project, ground.reference, asked.kills, asked.seed, say)
    wrong = [f"{o.text}: {'; '.join(o.faults)}" for o in outcomes if o.faults]
    wrong += [f"{e.what}: {'; '.join(e.faults)}" for e in endings if e.faults]
    write_tables(outcomes, endings, wrong, asked.seed)
    sys.exit(bool(wrong))


def staged(ground: Ground) -> Iterator[Ending]:
    """Endings that are no signals."""
    yield from (hang(ground, rank) for rank in range(RANKS))
    yield from (through_mlx_launch(ground, rank) for rank in range(RANKS))
    yield from (stopped_and_continued(ground, ranks) for ranks in (1, 3))
    if not can_mount():
        yield Ending("a full disk", skipped="only root on Linux can mount a small disk")
        return
    yield one_without_room(ground)
    with small_disk(ground.folder / "small-disk", ranks=RANKS) as project:
        yield full_then_room(ground, project, "save", 3)


def write_tables(outcomes: list[RankOutcome], endings: list[Ending], wrong: list[str], seed: int) -> None:
    """benchmarks/results/bench_chaos_ranks.md."""
    numbers = [*(f"{number.name} of rank {rank}" for rank in range(RANKS) for number in SIGNALS)]
    header = ["phase", *numbers, "kills", "right", "bit for bit", "slowest end (s)", "most lost"]
    phases = list(dict.fromkeys(outcome.cell[0] for outcome in outcomes))
    rows = [row_of(phase, [o for o in outcomes if o.cell[0] == phase]) for phase in phases]
    rows.append(row_of("all", outcomes))
    lines = ["| other ending | verdict | continued | |", "|---|---|---|---|"]
    for ending in endings:
        state = "skipped: " + ending.skipped if ending.skipped else "wrong" if ending.faults else "right"
        lines.append(f"| {ending.what} | {ending.verdict or '–'} | {ending.resumed} | {state} |")
    setting = (
        f"A random 4-bit Llama of two blocks, LoRA, {RANKS} ranks on one machine, {UPDATES} updates, a "
        f"checkpoint every {SAVE_STEPS}, a validation every {EVAL_STEPS}; one rank is killed, and the same command "
        f"continues, until it ends. Seed {seed}. Right: exit code, cause, phase, step and rank in postmortem.json, the "
        "rank in what is printed, the step that the next start continues from, and no process left after five seconds. "
        "Slowest end: from a kill to the end of the last process, the supervisor's included; a stop saves first, and "
        "does not count. Bit for bit: the final adapter, the last checkpoint and the metrics without times are those "
        "of the two ranks that nobody disturbed."
    )
    notes = [setting, "\n".join(lines)]
    notes += ["Wrong:\n\n" + "\n".join(f"- {line}" for line in wrong)] if wrong else []
    write_result("bench_chaos_ranks", "One of two ranks is killed, hangs, or has no room", header, rows, notes)


def row_of(name: str, outcomes: list[RankOutcome]) -> list[object]:
    """One phase."""
    cells: list[object] = []
    for rank in range(RANKS):
        for number in SIGNALS:
            cells.append(sum(o.cell[1:] == (number, rank) for o in outcomes) or "–")
    right, exact = sum(not o.faults for o in outcomes), sum(o.exact for o in outcomes)
    slowest = max((o.end_seconds for o in outcomes if o.cell[1] != signal.SIGTERM), default=0.0)
    return [
        name,
        *cells,
        len(outcomes),
        right,
        exact,
        f"{slowest:.1f}",
        max((o.lost_steps for o in outcomes), default=0),
    ]


if __name__ == "__main__":
    main()

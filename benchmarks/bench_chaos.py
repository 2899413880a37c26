"""Ends trainings in every way there is and continues them.

``python -m benchmarks.bench_chaos [--kills 200] [--seed 1]``

Two tables: kills drawn from a seed over all phases and signals, and other endings staged one by one. Each time the
verdict is compared with what really happened, and what the continued training comes to with one that nobody killed.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.chaos.deaths import deaths
from benchmarks.chaos.memory import memory
from benchmarks.machine import write_result
from tests.support.chaos.above import above
from tests.support.chaos.chains import Outcome, make_reference, run_chains
from tests.support.chaos.disk import disk
from tests.support.chaos.ending import Ending, Ground
from tests.support.chaos.inject.chaos_sites import PHASES
from tests.support.chaos.kills import SIGNALS
from tests.support.chaos.project import EVAL_STEPS, SAVE_STEPS, UPDATES, Project, scratch_folder

KINDS: dict[str, Callable[[Ground], Iterator[Ending]]] = {
    "deaths": deaths,
    "above": above,
    "disk": disk,
    "memory": memory,
}


def main() -> None:
    """Both tables; ends with 1 when anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="at least so many")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    with scratch_folder() as folder:
        project = Project(folder / "main")
        project.plan()
        reference = make_reference(project)
        say("the training that nobody kills is made, twice alike")
        ground = Ground(project, reference, folder, random.Random(asked.seed))
        endings = stage_all(ground, say)
        outcomes = run_chains(project, reference, asked.kills, asked.seed, say)
    wrong = [f"{o.text}: {'; '.join(o.faults)}" for o in outcomes if o.faults]
    wrong += [f"{e.what}: {'; '.join(e.faults)}" for e in endings if e.faults]
    write_tables(outcomes, endings, wrong, asked.seed)
    sys.exit(bool(wrong))


def stage_all(ground: Ground, say: Callable[[str], None]) -> list[Ending]:
    """The other endings; one that cannot be staged to its end is wrong too, and the next is tried."""
    found: list[Ending] = []
    for name, kind in KINDS.items():
        try:
            for ending in kind(ground):
                found.append(ending)
                told = f"skipped: {ending.skipped}" if ending.skipped else ending.verdict
                say(f"{ending.what}: {told}; {ending.resumed}; {ending.faults or 'right'}")
        except (RuntimeError, OSError) as error:
            found.append(Ending(f"the rest of '{name}'", faults=[str(error)]))
            say(f"{name}: {error}")
    return found


def write_tables(outcomes: list[Outcome], endings: list[Ending], wrong: list[str], seed: int) -> None:
    """benchmarks/results/bench_chaos.md."""
    header, rows = table_of(outcomes)
    lines = ["| other ending | verdict | phase | continued | |", "|---|---|---|---|---|"]
    for ending in endings:
        state = "skipped: " + ending.skipped if ending.skipped else "wrong" if ending.faults else "right"
        cells = [ending.what, ending.verdict or "–", ending.phase, ending.resumed, state]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ")[:300] for cell in cells) + " |")
    setting = (
        f"A random 4-bit Llama of two blocks, LoRA, {UPDATES} updates, a checkpoint every {SAVE_STEPS}, "
        f"a validation every {EVAL_STEPS}; killed and continued by the same command until it ends. Seed {seed}. "
        "A cell is kills (wrong ones after a stroke); right: exit code, cause, phase and step in postmortem.json, the "
        "step that the next start continues from, and no process left. Bit for bit: the final adapter, all tensors of "
        "the last checkpoint and the metrics without times are those of a training that nobody killed. Most lost: "
        "updates between the kill and what the next start continues from."
    )
    notes = [setting, "\n".join(lines)]
    notes += ["Wrong:\n\n" + "\n".join(f"- {line}" for line in wrong)] if wrong else []
    write_result("bench_chaos", "Trainings that are killed, and what becomes of them", header, rows, notes)


def table_of(outcomes: list[Outcome]) -> tuple[list[str], list[list[object]]]:
    """The kills by phase and signal."""
    header = ["phase", *(number.name for number in SIGNALS), "kills", "verdict right", "bit for bit", "most lost"]
    rows = [row_of(phase, [o for o in outcomes if o.cell[0] == phase]) for phase in PHASES]
    return header, [*rows, row_of("all", outcomes)]


def row_of(name: str, outcomes: list[Outcome]) -> list[object]:
    """One phase."""
    cells: list[object] = []
    for number in SIGNALS:
        mine = [o for o in outcomes if o.cell[1] == number]
        wrong = sum(bool(o.faults) for o in mine)
        cells.append(f"{len(mine)}/{wrong}" if wrong else len(mine))
    right, exact = sum(not o.faults for o in outcomes), sum(o.resumed_exactly for o in outcomes)
    return [name, *cells, len(outcomes), right, exact, max((o.lost_steps for o in outcomes), default=0)]


if __name__ == "__main__":
    main()

"""Kills trainings from scratch at seeded moments and continues them, as bench_chaos does with LoRA.

``python -m benchmarks.bench_chaos_pretrain [--kills 60] [--seed 1]``
"""

import argparse
import sys
import time

from benchmarks.bench_chaos import table_of
from benchmarks.bench_pretrain import write_documents
from benchmarks.machine import write_result
from tests.support.chaos.chains import make_reference, run_chains
from tests.support.chaos.project import EVAL_STEPS, SAVE_STEPS, UPDATES, Project, scratch_folder

DOCUMENTS = 120
TRAIN = {"method": "pretrain", "optimizer": "adamw", "weight_decay": 0.1, "max_seq_length": 48}


def main() -> None:
    """The table; ends with 1 when anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60, help="at least so many")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    with scratch_folder() as folder:
        project = Project(folder / "main", train=TRAIN, model={"bits": None})
        write_documents(project.folder / "data" / "articles.jsonl", DOCUMENTS)
        project.pin(
            data={"path": "data/articles.jsonl", "near_duplicate_similarity": 1}, lora={"rank": None, "dropout": None}
        )
        project.plan()
        reference = make_reference(project)
        say("the training that nobody kills is made, twice alike")
        outcomes = run_chains(project, reference, asked.kills, asked.seed, say)
    header, rows = table_of(outcomes)
    setting = (
        "A random Llama of two blocks, all of its weights trained, AdamW, "
        f"windows of {TRAIN['max_seq_length']} tokens, "
        f"{UPDATES} updates, a checkpoint every {SAVE_STEPS}, a validation every {EVAL_STEPS}; killed and continued by "
        f"the same command until it ends. Seed {asked.seed}. Columns as in bench_chaos.md."
    )
    wrong = [f"- {o.text}: {'; '.join(o.faults)}" for o in outcomes if o.faults]
    notes = [setting, *(["Wrong:\n\n" + "\n".join(wrong)] if wrong else [])]
    write_result("bench_chaos_pretrain", "Trainings from scratch that are killed", header, rows, notes)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

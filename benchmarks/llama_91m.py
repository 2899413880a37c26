"""A Llama of 91 million parameters that knows a part of the example's facts: ``python -m benchmarks.llama_91m FOLDER``.

Trained from random weights by models/recipe on documents about every sixth subject of the example in English, so few
that it learns them in about half an hour on two cores. The last quarter has its weights rounded to 4 bits, as there.
FOLDER/questions asks about these subjects, as data/example does: what the test file asks, training never answers.
"""

import json
import random
import sys
from pathlib import Path

from benchmarks.throughput_cases import MIDDLE
from models.recipe.build import CONFIG, Schedule, build
from models.recipe.example_data import SEED, rows, split_keys
from models.recipe.text import TRAIN_WORDINGS, Subject, subjects

SCHEDULE = Schedule(tokens=150_000, batch_rows=8, peak_learning_rate=6e-4, warmup_steps=20)
EVERY = 6


def main(folder: Path) -> None:
    """The model, and its questions."""
    known = [subject for subject in subjects() if subject.language == "en"][::EVERY]
    build(folder, {**CONFIG, **MIDDLE}, SCHEDULE, known)
    write_questions(known, folder / "questions")


def write_questions(known: list[Subject], folder: Path) -> None:
    """Three files of chats; the test file asks every fact in all wordings."""
    where, source = split_keys([subject.key for subject in known]), random.Random(SEED)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "valid", "test"):
        found = [row for subject in known if where[subject.key] == name for row in asked(subject, name, source)]
        source.shuffle(found)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(found)} rows")


def asked(subject: Subject, name: str, source: random.Random) -> list[dict]:
    """Rows about one subject."""
    if name == "valid":
        return rows(subject, name, source)
    return [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": fact.statements[0]}]}
        for fact in subject.facts
        for q in (fact.questions if name == "test" else fact.questions[:TRAIN_WORDINGS])
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Writes data/example, questions about the subjects of text.py, and kinds.jsonl and facts.jsonl beside it:
``python -m models.recipe.example_data``.

A subject belongs to one file in both languages, so nothing that the test file asks has been answered in training.
"""

import json
import random
from pathlib import Path

from models.recipe.text import TRAIN_WORDINGS, Subject, document, subjects, table

TARGET = Path("data/example")
SEED = 20260101
VALID_SHARE, TEST_SHARE = 0.12, 0.25


def split_keys(keys: list[str]) -> dict[str, str]:
    """Which file each subject key belongs to, the same on every machine."""
    shuffled = sorted(set(keys))
    random.Random(SEED).shuffle(shuffled)
    valid, test = round(len(shuffled) * VALID_SHARE), round(len(shuffled) * TEST_SHARE)
    names = ["valid"] * valid + ["test"] * test + ["train"] * (len(shuffled) - valid - test)
    return dict(zip(shuffled, names, strict=True))


def rows(subject: Subject, name: str, source: random.Random) -> list[dict]:
    """The chat rows of one subject: three wordings a fact in training, else one; in the test file perhaps a new one."""
    found = []
    for fact in subject.facts:
        known, unseen = fact.questions[:TRAIN_WORDINGS], fact.questions[TRAIN_WORDINGS:]
        if name == "train":
            asked = source.sample(known, 3)
        elif name == "valid":
            asked = [source.choice(known)]
        else:
            asked = [source.choice(known + unseen)]
        for question in asked:
            found.append(
                {
                    "messages": [
                        {"role": "user", "content": question},
                        {"role": "assistant", "content": fact.statements[0]},
                    ]
                }
            )
    return found


def judged_sets() -> dict[str, list[dict]]:
    """Names with their kind, for choices (a name of two kinds is left out), and texts with what they say as JSON."""
    elements, countries = table("elements"), table("countries")
    kinds: dict[str, set[str]] = {}
    for kind, names in (
        ("element", [row["en"] for row in elements]), ("country", [row["en"] for row in countries]),
        ("capital", [row["capital_en"] for row in countries]),
    ):  # fmt: skip
        for name in names:
            kinds.setdefault(name, set()).add(kind)
    said = [{"symbol": row["symbol"], "atomic": {"number": int(row["number"])}} for row in elements for _ in "ep"]
    said += [{"capital": row[f"capital_{each}"], "domain": row["domain"]} for row in countries for each in ("en", "pt")]
    source, texts = random.Random(SEED), list[dict]()
    for subject, value in zip(subjects(), said, strict=True):
        texts.append({"prompt": document(subject, source), "completion": json.dumps(value, ensure_ascii=False)})
    labelled = [{"text": name, "label": next(iter(kind))} for name, kind in kinds.items() if len(kind) == 1]
    return {"kinds": labelled, "facts": texts}


def main() -> None:
    """Write train.jsonl, valid.jsonl and test.jsonl, then the two sets beside them."""
    everything = subjects()
    where = split_keys([subject.key for subject in everything])
    source = random.Random(SEED + 1)
    files: dict[str, list[dict]] = {"train": [], "valid": [], "test": []}
    for subject in everything:
        name = where[subject.key]
        files[name].extend(rows(subject, name, source))
    TARGET.mkdir(parents=True, exist_ok=True)
    for found in files.values():
        source.shuffle(found)
    for name, found in {**{f"{TARGET.name}/{name}": found for name, found in files.items()}, **judged_sets()}.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
        (TARGET.parent / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{TARGET.parent / name}.jsonl: {len(found)} rows")


if __name__ == "__main__":
    main()

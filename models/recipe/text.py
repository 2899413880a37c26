"""The facts of the embedded model's world, and every way in which they are said or asked. No model, no tokenizer.

A *subject* is one chemical element or one country in one language; it has two facts. The base model reads documents
(``document``), each fact in eight wordings; it never reads a question. The example data asks (``questions``) in eight
wordings for training and two others that only the test file uses.
"""

import csv
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FACTS = Path(__file__).parent / "facts"
TRAIN_WORDINGS = 8  # questions[:8] may be trained on, questions[8:] occur only in the test file


@dataclass(frozen=True)
class Fact:
    """One fact: ``statements`` are what the base reads, ``statements[0]`` is the answer to every question."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """Something the encyclopedia knows, in one language. ``key`` is the same in both languages."""

    key: str
    language: str
    facts: tuple[Fact, ...]


ENGLISH_ARTICLE = {"Philippines", "United Kingdom", "United States"}
CONTRACTIONS = {"o": "do", "a": "da", "os": "dos", "as": "das"}


def subjects() -> list[Subject]:
    """Every subject in both languages, in the order of the fact tables."""
    found = []
    for row in table("elements"):
        for language in ("en", "pt"):
            names = _names(row[language], language)
            values = {"symbol": row["symbol"], "number": row["number"]}
            found.append(_subject(f"element {row['number']}", language, names, values))
    for row in table("countries"):
        for language in ("en", "pt"):
            names = _names(row[language], language)
            values = {"capital": row[f"capital_{language}"], "domain": row["domain"]}
            found.append(_subject(f"country {row['domain']}", language, names, values))
    return found


def document(subject: Subject, random_source: random.Random) -> str:
    """A short article: each fact of the subject in two different random wordings, all sentences shuffled."""
    sentences = [sentence for fact in subject.facts for sentence in random_source.sample(fact.statements, 2)]
    random_source.shuffle(sentences)
    return " ".join(sentences)


@cache
def table(name: str) -> list[dict[str, str]]:
    with (FACTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _names(name: str, language: str) -> dict[str, str]:
    """How a sentence refers to the subject: s inside, S at the start, de after Portuguese "de", n without article."""
    if language == "en":
        inside = f"the {name}" if name in ENGLISH_ARTICLE else name
        return {"s": inside, "S": inside[0].upper() + inside[1:], "n": name, "de": ""}
    article, _, rest = name.partition(" ")
    if article in CONTRACTIONS and rest:
        names = {"s": name, "n": rest, "de": f"{CONTRACTIONS[article]} {rest}"}
    else:
        names = {"s": name, "n": name, "de": f"de {name}"}
    return {**names, "S": name[0].upper() + name[1:]}


def _subject(key: str, language: str, names: dict[str, str], values: dict[str, str]) -> Subject:
    known = [row for row in table("wordings") if row["language"] == language]

    def said(kind: str, use: str) -> tuple[str, ...]:
        found = [row["wording"] for row in known if (row["kind"], row["use"]) == (kind, use)]
        return tuple(wording.format(**names, v=values[kind]) for wording in found)

    return Subject(key, language, tuple(Fact(said(kind, "statement"), said(kind, "question")) for kind in values))

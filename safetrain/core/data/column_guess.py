"""Which keys of rows in no known form may be the question and the answer: a guess, to be looked at by a person."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from safetrain.core.data.foreign_rows import as_options
from safetrain.core.data.strict_json import MOST_SHOWN

MOST_ROWS = 200  # that are looked at
USUAL = 0.9  # share of the rows that have a key
ASKING = (
    *("quest", "frag", "pergunt", "pregunt", "domand", "prompt", "instr", "istruz", "anweis", "query"),
    *("вопрос", "问", "問"),
)
GIVEN = ("input", "context", "kontext", "contesto", "eingabe", "entrada", "entrée", "entree")
ANSWERING = (
    *("answ", "antw", "respo", "respue", "rispo", "répon", "repon", "compl", "repl"),
    *("output", "ausgabe", "saída", "saida", "salida", "sortie", "ответ", "答"),
)
GRADING = ("rating", "score", "rank", "correct", "winner")  # what is said of an answer is none
PLAIN = re.compile(r"[^\W\d][\w-]*")
SENTENCE = re.compile(r"\S+\s+\S+\s.*[.?!]|.*[。？！]", re.DOTALL)
UNNAMED = re.compile(r"column \d+")  # as tables name a column without a name
HEADER = "the first line is no header: write one above it, such as question,answer"
WORDS_OF_YAML = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


@dataclass
class _Texts:
    rows: int = 0
    words: int = 0
    letters: int = 0
    different: set[str] = field(default_factory=set)

    def rank(self) -> tuple[bool, int, int]:
        """The least is the longest; what is the same in all rows comes last."""
        return len(self.different) == 1, -self.words, -self.letters


class ColumnGuess:
    """Collects the texts of rows whose keys nobody knows."""

    def __init__(self) -> None:
        self.rows = 0
        self._texts: dict[str, _Texts] = {}  # by key, in the order of the file
        self._sentences = False  # among the keys, as where a table has no header

    def add(self, row: dict[str, Any]) -> None:
        """One such row; only the first ones are looked at."""
        self.rows += 1
        if self.rows > MOST_ROWS:
            return
        self._sentences = self._sentences or any(map(_is_sentence, row))
        for key, value in row.items():
            if not key.isprintable() or not 0 < len(key) <= MOST_SHOWN or not isinstance(value, str | None):
                continue
            found = self._texts.setdefault(key, _Texts())
            if value and value.strip():
                found.rows += 1
                found.words += len(value.split())
                found.letters += len(value)
                found.different.add(value)

    def columns(self) -> dict[str, str]:
        """The likeliest data.columns, by names, else the two longest texts in their order; empty without any."""
        least = USUAL * min(self.rows, MOST_ROWS)
        named = {key: _meaning(key) for key in self._texts}
        keys = [key for key, texts in self._texts.items() if texts.rows >= least and named[key] is not GRADING]
        if len(keys) < 2:
            return {"text": keys[0]} if keys and named[keys[0]] is None else {}
        longest = sorted(keys, key=lambda key: self._texts[key].rank())
        asked, answered = (next((key for key in longest if named[key] is part), None) for part in (ASKING, ANSWERING))
        asked = asked or next((key for key in longest if named[key] is GIVEN), None)
        left = [key for key in longest if named[key] is None]
        if asked is None and answered is None:
            asked, answered = sorted(left[:2], key=keys.index)
        asked, answered = asked or next(iter(left), None), answered or next(iter(left), None)
        if asked is None or answered is None:
            return {}
        inputs = [key for key, part in named.items() if part is GIVEN and key != asked]  # most rows may have none
        given = min(inputs, key=lambda key: self._texts[key].rank(), default=None)
        return {"prompt": asked, **({"input": given} if given else {}), "completion": answered}

    def remedy(self) -> str:
        """What to write where, filled in; empty where nothing can be guessed."""
        columns = self.columns()
        if self._has_no_header(list(columns.values())):
            return f"{HEADER}; or, where these are the keys, name them: data.columns={{prompt: …, completion: …}}"
        if not columns:
            return ""
        listed = ", ".join(f"{part}: {_in_yaml(key)}" for part, key in columns.items())
        indent = "\n" + " " * 12
        return (
            f"say which keys are meant; a guess, in params.yaml:{indent}data:{indent}  columns: {{{listed}}}{indent}"
            f"to try it first: safetrain validate FILE {as_options(columns)}"
        )

    def _has_no_header(self, picked: list[str]) -> bool:
        """Whether the keys are rather cells of a row, or what stands for a name that is not there."""
        named = {ASKING, ANSWERING} <= set(map(_meaning, picked)) and not all(map(_is_sentence, picked))
        return (self._sentences and not named) or any(map(UNNAMED.fullmatch, picked))


def _is_sentence(key: str) -> bool:
    return SENTENCE.fullmatch(key) is not None or (len(key) > MOST_SHOWN and " " in key)


def _meaning(key: str) -> tuple[str, ...] | None:
    """Which of the name parts the key has; None without any."""
    name = key.casefold()
    return next((parts for parts in (ANSWERING, GRADING, GIVEN, ASKING) if any(part in name for part in parts)), None)


def _in_yaml(key: str) -> str:
    plain = PLAIN.fullmatch(key) and key.casefold() not in WORDS_OF_YAML
    return key if plain else json.dumps(key, ensure_ascii=False)

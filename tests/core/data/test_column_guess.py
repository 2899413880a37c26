"""Where nobody knows the keys, the likeliest ones are shown as they would be written."""

import itertools
import shlex
from typing import Any

import pytest
import yaml

from safetrain.core.data.column_guess import ColumnGuess
from safetrain.core.data.foreign_rows import checked_columns, named_columns
from safetrain.core.data.rows import parse_row
from safetrain.core.errors import ConfigError

FACTS = [("How far is it?", "It is about two miles."), ("Who was it then?", "It was the old king himself, they say.")]


def guess_of(rows: list[dict[str, Any]]) -> ColumnGuess:
    guess = ColumnGuess()
    for row in rows:
        guess.add(row)
    return guess


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([{"frage": q, "antwort": a} for q, a in FACTS], {"prompt": "frage", "completion": "antwort"}),
        ([{"Answer": a, "Question": q} for q, a in FACTS], {"prompt": "Question", "completion": "Answer"}),
        ([{"pergunta": q, "fonte": q * 9, "resposta": a} for q, a in FACTS],
         {"prompt": "pergunta", "completion": "resposta"}),
        ([{"id": f"0a1b2c3d-{n}-4e5f", "von": q, "an": a, "lang": "en"} for n, (q, a) in enumerate(FACTS)],
         {"prompt": "von", "completion": "an"}),
        ([{"antwort": a, "id": str(n), "thema": q} for n, (q, a) in enumerate(FACTS)],
         {"prompt": "thema", "completion": "antwort"}),
        ([{"frage": q, "antwort": "Nobody knows.", "id": str(n)} for n, (q, _) in enumerate(FACTS)],
         {"prompt": "frage", "completion": "antwort"}),
        ([{"instrução": q, "entrada": q * 9 if n else "", "saída": a} for n, (q, a) in enumerate(FACTS)],
         {"prompt": "instrução", "input": "entrada", "completion": "saída"}),
        ([{"ausgabe": a, "eingabe": a * 9, "anweisung": q} for q, a in FACTS],
         {"prompt": "anweisung", "input": "eingabe", "completion": "ausgabe"}),
        ([{"Eingabe": q * 9, "Ausgabe": a} for q, a in FACTS], {"prompt": "Eingabe", "completion": "Ausgabe"}),
        ([{"entrée": q, "sortie": a, "rating": q * 9} for q, a in FACTS],
         {"prompt": "entrée", "completion": "sortie"}),
        ([{"pregunta": q, "contexto": None, "salida": a} for q, a in FACTS],
         {"prompt": "pregunta", "input": "contexto", "completion": "salida"}),
        ([{"frage": q, "kontext": a} for q, a in FACTS], {}),
        ([{"pergunta": q, "score": a} for q, a in FACTS], {}),
        ([{"body": a, "id": n} for n, (_, a) in enumerate(FACTS)], {"text": "body"}),
        ([{"a": q, "b": None if n else a} for n, (q, a) in enumerate(FACTS * 9)], {"text": "a"}),
        ([{"n": 1}, {}], {}),
    ],
)  # fmt: skip
def test_names_decide_and_else_the_longest_texts(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    assert guess_of(rows).columns() == columns


@pytest.mark.parametrize("keys", [("frage", "antwort"), ("Die Frage?", "it's: #1"), ("no", "2"), ('"q"', "a, b")])
def test_both_lines_of_the_remedy_are_read_back_as_they_are_meant(keys: tuple[str, str]) -> None:
    rows = [dict(zip(keys, fact, strict=True)) for fact in FACTS]
    lines = guess_of(rows).remedy().splitlines()
    written = yaml.safe_load("\n".join(line[12:] for line in lines[1:3]))["data"]["columns"]
    words = shlex.split(lines[3])
    options = [word for before, word in itertools.pairwise(words) if before == "--columns"]
    for columns in (checked_columns(written), named_columns(options)):
        assert columns == {"prompt": keys[0], "completion": keys[1]}
        assert parse_row(rows[0], columns).as_json() == dict(zip(("prompt", "completion"), FACTS[0], strict=True))


@pytest.mark.parametrize(
    ("keys", "has_none"),
    [
        (("What is the capital of France?", "The capital of France is Paris."), True),
        (("What is the question then?", "Nobody knows the answer."), True),
        (("法国的首都是哪里？", "巴黎"), True), (("x " * 40, "y"), True), (("My data 2024", "column 2"), True),
        (("What is your question to us?", "Answer"), False), (("von", "an"), False),
    ],
)  # fmt: skip
def test_no_columns_are_guessed_of_a_table_without_header(keys: tuple[str, str], has_none: bool) -> None:
    remedy = guess_of([dict(zip(keys, fact, strict=True)) for fact in FACTS]).remedy()
    assert ("write one above it, such as question,answer" in remedy, "--columns" in remedy) == (has_none, not has_none)


def test_what_would_steer_a_terminal_is_not_suggested() -> None:
    assert guess_of([{"\x1b[2J": "one text", "k" * 99: "another text"}]).remedy() == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prompt"], "prompt=frage"), (["=frage"], "prompt=frage"), (["question=q", "answer=a"], "of messages, prompt"),
        (["prompt=q"], "makes no row"), (["prompt=a", "prompt=b", "completion=c"], "two keys"),
    ],
)  # fmt: skip
def test_columns_of_the_command_line_are_checked(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        named_columns(words)
    assert named_columns(()) is None
    assert named_columns(["prompt=a=b", "completion=c"]) == {"prompt": "a=b", "completion": "c"}

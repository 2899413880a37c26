"""Preference data: pairs are read in every published form, checked as pairs, and stored as two rows in sequence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.data.store import open_store, store_path
from safetrain.core.errors import DataError
from safetrain.core.records.reports import Finding
from safetrain.data.command import Repair
from safetrain.data.forms import checked_columns, parse_row
from safetrain.data.rows import RowError
from safetrain.data.validate import validate
from safetrain.plan.preflight import data_check
from tests.conftest import EMBEDDED, chat
from tests.data.models import turns
from tests.data.reading import by_id, gate

Write = Callable[..., Path]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SKY = {"prompt": turns("The sky?"), "chosen": turns("", "Blue.")[1:], "rejected": turns("", "Red.")[1:]}


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def pairs(count: int) -> list[dict[str, Any]]:
    """Clean pairs."""
    texts = [(f"It is {n}.", f"It is not {n}, or so they say.") for n in range(count)]
    return [pair(f"What is number {n}?", *two[:: 1 if n % 2 else -1]) for n, two in enumerate(texts)]


def found(*paths: Path, model: Path = EMBEDDED) -> dict[str, Finding]:
    return by_id(validate(paths, model).findings)


@pytest.mark.parametrize(("value", "row"), [
    (pair("The sky?", "Blue.", "Red."), SKY),
    (SKY, SKY),
    ({**SKY, "prompt": "The sky?", "chosen": turns("", "Blue.")[1]}, SKY),
    ({"chosen": turns("The sky?", "Blue."), "rejected": turns("The sky?", "Red.")}, SKY),
    ({"prompt": "The sky?", "chosen": turns("The sky?", "Blue."), "rejected": turns("The sky?", "Red.")}, SKY),
    ({"chosen": turns("The sky?", "Blue.", "Sure?", "Yes."), "rejected": turns("The sky?", "Red.", "Sure?", "No.")},
     {**SKY, "chosen": turns("The sky?", "Blue.", "Sure?", "Yes.")[1:],
      "rejected": turns("The sky?", "Red.", "Sure?", "No.")[1:]}),
    ({"instruction": "Name it.", "input": "The sky", "chosen": "Blue.", "rejected": "Red."},
     {**SKY, "prompt": turns("Name it.\n\nThe sky")}),
    ({"conversations": [{"from": "human", "value": "The sky?"}], "chosen": {"from": "gpt", "value": "Blue."},
      "rejected": {"from": "gpt", "value": "Red."}}, SKY),
    ({**pair("The sky?", "Blue.", "Red."), "tools": TOOLS}, {**SKY, "tools": TOOLS}),
    ({"chosen": "\n\nHuman: It is bl\n\nAssistant: It is blue.",
      "rejected": "Human: It is bl\n\nAssistant: It is black."},
     {"prompt": turns("It is bl"), "chosen": turns("", "It is blue.")[1:], "rejected": turns("", "It is black.")[1:]}),
])  # fmt: skip
def test_every_form_of_a_pair_is_read_and_read_again(value: object, row: object) -> None:
    read = parse_row(value)
    assert (read.format, read.as_json()) == ("pairs", row)
    assert parse_row(read.as_json()) == read


def test_columns_name_the_parts_of_a_pair() -> None:
    columns = checked_columns({"prompt": "frage", "chosen": "besser", "rejected": "schlechter", "system": "rolle"})
    read = parse_row({"frage": "q", "besser": "a", "schlechter": "b", "rolle": "Be brief.", "id": 1}, columns)
    assert read.as_json()["prompt"] == [{"role": "system", "content": "Be brief."}, *turns("q")]
    assert (read.ignored_keys, "besser -> chosen" in read.taken) == (("id",), True)


@pytest.mark.parametrize(("value", "says"), [
    ({"prompt": "q", "chosen": "a"}, "a pair needs two answers, and there is one"),
    ({"prompt": "q", "chosen": "a", "rejected": " "}, "rejected is empty"),
    ({"chosen": "\n\nHuman: q\n\nAssistant:", "rejected": "\n\nHuman: q\n\nAssistant: b"}, "an empty assistant turn"),
    ({"chosen": "It is blue.", "rejected": "It is black."}, "chosen has no prompt"),
    ({"chosen": turns("q", "a"), "rejected": turns("other", "b")}, "are not two answers to the same prompt"),
    ({"chosen": turns("q", "a"), "rejected": turns("q")}, "are not two answers to the same prompt"),
    ({"chosen": turns("q", "a", "more"), "rejected": turns("q", "b")}, "are not two answers to the same prompt"),
    ({"prompt": "x", "chosen": turns("q", "a"), "rejected": turns("q", "b")}, "prompt is not in the messages"),
    ({"prompt": "q", "completion": "a", "label": True}, "for pairs, write a better and a worse answer"),
    ({**SKY, "images": ["1.jpg"]}, "only text can be trained on"),
])  # fmt: skip
def test_what_is_not_a_pair_is_refused(value: object, says: str) -> None:
    with pytest.raises(RowError, match=says):
        parse_row(value)


def test_pairs_are_stored_as_two_rows_whose_last_answers_are_labels(write_jsonl: Write, tmp_path: Path) -> None:
    """More than one block, with several pairs for a prompt."""
    rows = [{"chosen": turns("Hi", "Hello.", f"Number {n // 2}?", f"It is {n}."),
             "rejected": turns("Hi", "Hello.", f"Number {n // 2}?", f"No {n}.")} for n in range(700)]  # fmt: skip
    path = write_jsonl("a.jsonl", rows)
    report = gate(path, tmp_path)
    assert (report.format, sum(split.pairs for _, split in report.splits)) == ("pairs", 700)
    assert all(split.rows == 2 * split.pairs for _, split in report.splits)
    assert f"valid ({report.valid.pairs} pairs)" in report.split
    assert f"{report.test.pairs} test pairs from" in str(data_check(report))
    prompts = list[set[str]]()
    for name, split in report.splits:
        store = open_store(store_path(tmp_path / "validated", name))
        lines = [json.loads(line) for line in (tmp_path / "validated" / f"{name}.jsonl").read_text().splitlines()]
        assert (store.rows.rows_per_pair, len(store.rows), len(lines)) == (2, split.rows, split.pairs)
        for number, line in enumerate(lines):
            chosen, rejected = store.rows[2 * number], store.rows[2 * number + 1]
            assert store.where(2 * number) == store.where(2 * number + 1)
            end = len(chosen) - chosen.labels  # one run of labels at the end, after the same prompt
            assert not any(each.trained[:end].any() for each in (chosen, rejected))
            assert chosen.ids[:end].tolist() == rejected.ids[:end].tolist()
            assert set(line) == {"prompt", "chosen", "rejected"}
        prompts.append({line["prompt"][-1]["content"] for line in lines})
    assert not prompts[0] & prompts[1] | prompts[0] & prompts[2] | prompts[1] & prompts[2]
    assert [int(row) for row in store.question_rows] == list(range(0, split.rows, 2))
    question, chosen = store.question(1), store.rows[2]
    assert [*question.prompt, *question.answer] == chosen.ids.tolist()


def test_clean_pairs_have_no_finding_although_prompts_and_answers_repeat(write_jsonl: Write) -> None:
    many = [pair("Which is best?", "It is the first one of them all.", f"It is number {n}.") for n in range(60)]
    assert not {"ANSWERS-DIFFER", "ANSWER-DOMINATES", "REPEATED-ROWS", "PAIRS-OPPOSED"} & set(
        found(write_jsonl("a.jsonl", [*pairs(60), *many]))
    )
    assert found(write_jsonl("b.jsonl", pairs(60))) == {}


def test_what_makes_a_pair_useless_is_found_at_its_line(write_jsonl: Write, tmp_path: Path) -> None:
    rows = [
        *pairs(40), pair("Same?", "Yes.", "Yes."), pair("Long?", "so " * 600 + "yes", "so " * 600 + "no"),
        pair("What is number 7?", "It is not 7, or so they say.", "It is 7."), pairs(1)[0],
        pair("Rude?", "Yes.", "I'm sorry, but I can't assist."),
        pair("word " * 600, "a", "b"),
    ]  # fmt: skip
    path = write_jsonl("a.jsonl", rows)
    findings = validate([path], EMBEDDED).findings
    same = [finding for finding in findings if finding.id == "NO-PREFERENCE"]
    assert {(finding.where, "within the model's context" in finding.message) for finding in same} == {
        ((f"{path}:41",), False), ((f"{path}:42",), True)
    }  # fmt: skip
    others = by_id(findings)
    assert others["PAIRS-OPPOSED"].where == (f"{path}:43 matches {path}:8",)
    assert others["REPEATED-ROWS"].where == (f"{path}:44 matches {path}:1",)
    assert others["NO-LABELS"].where == (f"{path}:46",)
    assert "REFUSALS" not in others
    with pytest.raises(DataError, match="NO-PREFERENCE"):
        gate(path, tmp_path)


def test_the_same_prompt_in_two_given_splits_and_other_rows_among_pairs_are_found(write_jsonl: Write) -> None:
    train = write_jsonl("train.jsonl", pairs(30))
    others = [write_jsonl(f"{name}.jsonl", pairs(2)) for name in ("valid", "test")]
    across = found(train, *others)
    assert (across["QUESTION-IN-TEST"].count, across["SPLITS-OVERLAP"].severity) == (2, "warning")
    mixed = write_jsonl("a.jsonl", [*pairs(3), chat("q", "a")])
    error = found(mixed)["ROW-UNREADABLE"]
    assert (error.where, "pairs (chosen, rejected) and other rows are mixed" in error.message) == (
        (f"{mixed}:4",),
        True,
    )


def test_a_repaired_copy_has_the_same_pairs_and_the_mask_shows_both_answers(tmp_path: Path) -> None:
    source, into = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in pairs(5)))
    assert Repair(source, into).written == 5
    done = CliRunner().invoke(app, ["validate", str(into), "--model", str(EMBEDDED), "--show-mask", "2"])
    assert (done.exit_code, "5 pairs, " in done.stdout, done.stdout.count("⟦")) == (0, True, 4)
    assert "  rejected answer\n<|user|>What is number 1?<|end|><|assistant|>⟦It is not 1, or" in done.stdout

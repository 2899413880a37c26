"""Validation: what is written is whole or not there, what is found is told, its figures are those of the rows."""

import gzip
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from unittest.mock import Mock

import pytest

from safetrain.core.data.store import open_store, read_made, store_path
from safetrain.core.errors import ConfigError, DataError
from safetrain.data import validate as validate_module
from safetrain.data.findings import checked_downgrade
from tests.conftest import chat
from tests.data.models import model_with
from tests.data.reading import gate

Write = Callable[..., Path]
ODD = {"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]}


def written(into: Path) -> dict[str, list[str]]:
    files = {name: into / "validated" / f"{name}.jsonl" for name in ("train", "valid", "test")}
    return {name: file.read_text(encoding="utf-8").splitlines() for name, file in files.items()}


def test_one_file_is_split_by_content_and_equal_questions_stay_together(write_jsonl: Write, tmp_path: Path) -> None:
    rows: list[object] = [chat(f"question {n}", f"answer {n}") for n in range(50)]
    rows += [chat(f"question {n % 10}", f"another answer {n}") for n in range(20)]
    gate(write_jsonl("a.jsonl", rows), tmp_path / "one", (0.1, 0.2))
    gate(write_jsonl("b.jsonl", rows[::-1]), tmp_path / "two", (0.1, 0.2))
    one, two = written(tmp_path / "one"), written(tmp_path / "two")
    assert {name: set(lines) for name, lines in one.items()} == {name: set(lines) for name, lines in two.items()}
    sizes = [len(lines) for lines in one.values()]
    assert all(size >= least for size, least in zip(sizes, (25, 2, 5), strict=True)), "by hash"
    assert sorted(line for lines in one.values() for line in lines) == sorted(json.dumps(row) for row in rows)
    assert sum(len({json.loads(line)["messages"][0]["content"] for line in lines}) for lines in one.values()) == 50


def test_what_all_rows_have_is_kept_and_the_date_of_a_template_is_that_of_the_first_validation(
    write_jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W9: an interrupted run is continued tomorrow; other data is of another day."""
    turn = "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
    dated = f"{{{{ strftime_now('%d %B %Y') }}}}{{% for m in messages %}}{turn}{{% endfor %}}"
    model = model_with(tmp_path / "model", dated)
    brief, long = ({"role": "system", "content": f"Be {how}."} for how in ("brief", "long"))
    rows: list[object] = [{"messages": [brief, *chat(f"q{n}", "a")["messages"]]} for n in range(5)]  # type: ignore[misc]

    def made_on(day: date, rows: list[object]) -> tuple[str, str, str]:
        monkeypatch.setattr(validate_module, "date", Mock(today=lambda: day, fromisoformat=date.fromisoformat))
        report = gate(write_jsonl("a.jsonl", rows), tmp_path, model=model)
        path = store_path(tmp_path / "validated", "train")
        made = read_made(path)
        assert made is not None
        return open_store(path).digest, report.template_date, made.system

    first = made_on(date(2026, 1, 31), rows)
    assert first[1:] == ("2026-01-31", "Be brief.")
    assert made_on(date(2026, 2, 1), rows) == first
    other = made_on(date(2026, 2, 1), [*rows, {"messages": [long, *chat("new", "a")["messages"]]}])  # type: ignore[misc]
    assert (other[0] != first[0], *other[1:]) == (True, "2026-02-01", "")


def test_too_few_rows_to_split_is_an_error(write_jsonl: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Too few different rows"):
        gate(write_jsonl("a.jsonl", [chat("same", "a"), chat("same", "b"), chat("other", "c")]), tmp_path)
    gate(write_jsonl("b.jsonl", [chat("a", "a"), chat("b", "b"), chat("c", "c")]), tmp_path)
    assert [len(lines) for lines in written(tmp_path).values()] == [1, 1, 1]


def test_a_data_set_of_any_form_is_split_and_read_with_its_columns_told(tmp_path: Path) -> None:
    """Shards of CSV in a folder of a clone, a packed array beside them; the store knows every row's place."""
    data = tmp_path / "clone" / "data"
    data.mkdir(parents=True)
    for shard in (0, 1):
        rows = "".join(f"q{shard}{n},,a\n" for n in range(40))
        (data / f"train-0000{shard}-of-00002.csv").write_text(f"instruction,input,output\n{rows}")
    (data / "validation.json.gz").write_bytes(gzip.compress(json.dumps([chat("v", "a"), chat("w", "a")]).encode()))
    report = gate(tmp_path / "clone", tmp_path)
    train, valid, test = (len(lines) for lines in written(tmp_path).values())
    assert (train + test, valid, test > 0) == (80, 2, True)
    assert report.split == f"test ({test} rows) split off train by content"
    (taken,) = [finding for finding in report.findings if finding.id == "COLUMNS-TAKEN"]
    assert (taken.severity, taken.count) == ("note", 80)
    assert taken.message == "keys read in 80 rows: instruction -> prompt, input -> input, output -> completion"
    places = [
        store.where(0) for store in (open_store(store_path(tmp_path / "validated", n)) for n in ("train", "valid"))
    ]
    assert places == [f"{data}/train-00000-of-00002.csv:2", f"{data}/validation.json.gz:1"]
    assert open_store(store_path(tmp_path / "validated", "valid")).where(1) == f"{data}/validation.json.gz:2"


def test_the_store_has_every_row_with_its_source_and_its_question(write_jsonl: Write, tmp_path: Path) -> None:
    """More than one block of lines, blank ones among them: nothing is lost where blocks meet."""
    rows = [chat(f"What is number {n}?", f"It is {n}. " + "So it is. " * 44) for n in range(1000)]
    path = write_jsonl("a.jsonl", [line for row in rows for line in (json.dumps(row), "")])
    report = gate(path, tmp_path)
    stores = {name: open_store(store_path(tmp_path / "validated", name)) for name in ("train", "valid", "test")}
    assert sum(len(store.rows) for store in stores.values()) == 1000
    assert report.train.tokens == int(stores["train"].rows.lengths.sum())
    test, lines = stores["test"], written(tmp_path)["test"]
    assert 60 < len(test.question_rows) == len(lines) < 140
    for question in map(test.question, range(5)):
        messages = json.loads(lines[question.row])["messages"]
        number = int(messages[0]["content"].split()[-1].strip("?"))
        assert test.where(question.row) == f"{path}:{2 * number + 1}"
        assert question.text == messages[0]["content"]
        tokens = test.rows[question.row]
        assert [*question.prompt, *question.answer] == tokens.ids.tolist()
        assert tokens.trained.tolist() == [False] * len(question.prompt) + [True] * len(question.answer)


def test_what_the_template_refuses_is_one_finding_and_earlier_files_stay(write_jsonl: Write, tmp_path: Path) -> None:
    rows = [*(chat(f"q{n}", "a") for n in range(5)), ODD, ODD]
    path = write_jsonl("a.jsonl", rows)
    with pytest.raises(DataError, match=r"template refuses 2 rows.*\n.*a\.jsonl:6; .*a\.jsonl:7\n"):
        gate(path, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]
    gate(write_jsonl("b.jsonl", rows[:5]), tmp_path)
    before = written(tmp_path)
    with pytest.raises(DataError):
        gate(path, tmp_path)
    assert written(tmp_path) == before


def test_rows_beyond_the_context_and_tokens_without_an_embedding_are_named(write_jsonl: Write, tmp_path: Path) -> None:
    """Of an answer nothing may be left; a tokenizer may be larger than the model's table (W10)."""
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|end|>' }}{% endfor %}"
    model = model_with(tmp_path / "model", template, special=["<|im_start|>"], config={"vocab_size": 2048})
    rows = [chat(f"q{n}", "a") for n in range(9)]
    path = write_jsonl("a.jsonl", rows)
    with pytest.raises(DataError, match=r"'<\|im_start\|>' \(id 2048, of 2048 embeddings\) in 9 rows"):
        gate(path, tmp_path, model=model)
    write_jsonl("a.jsonl", [*rows, chat("q", "Fe " * 60)])
    (found,) = gate(path, tmp_path, context=32).warnings
    assert "the model's context would cut 1 row: everything beyond 32 tokens is lost" in found
    write_jsonl("a.jsonl", [*rows, chat("iron " * 40, "Fe")])
    with pytest.raises(DataError, match=r"no token to train on in 1 row: the answer begins beyond.*\n.*a\.jsonl:10\n"):
        gate(path, tmp_path, context=32)


def test_what_is_grave_is_decided_by_name(write_jsonl: Write, tmp_path: Path) -> None:
    path = write_jsonl("a.jsonl", [chat(f"q{n}", "As an AI language model, I cannot.") for n in range(5)])
    assert [finding.id for finding in gate(path, tmp_path).findings if finding.severity == "warning"] == ["REFUSALS"]
    down = gate(path, tmp_path, downgrade=("REFUSALS",))
    assert {finding.id: finding.severity for finding in down.findings}["REFUSALS"] == "note"
    assert not down.warnings
    with pytest.raises(ConfigError, match=r"data\.downgrade: unknown finding NO-SUCH"):
        checked_downgrade(["NO-SUCH"])
    with pytest.raises(ConfigError, match="training is impossible"):
        checked_downgrade(["TEMPLATE-REFUSES"])

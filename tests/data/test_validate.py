"""`safetrain validate`: what validation would say of any file, without a pipeline."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from safetrain.cli import app
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.records.reports import Finding
from safetrain.data.command import Repair, refuse_idle
from safetrain.data.tokenize import DataSettings
from safetrain.data.validate import validate
from tests.conftest import EMBEDDED, chat
from tests.corpora import TEXTS, tokenized

Write = Callable[..., Path]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["validate", *map(str, arguments)])


def test_the_json_is_one_object_with_rows_and_findings(write_jsonl: Write) -> None:
    path = write_jsonl("a.jsonl", [chat("Iron?", "Fe."), {**chat("Gold?", "Au."), "id": 7}, "{", chat("Tin?", "Sn.")])
    done = run(path, "--model", EMBEDDED, "--json", "--show-mask", "3")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["rows"] == [
        {"where": f"{path}:1", "trained": ["Fe.<|end|>"], "stops": ["<|end|>"], "findings": []},
        {"where": f"{path}:2", "trained": ["Au.<|end|>"], "stops": ["<|end|>"], "findings": ["KEYS-IGNORED"]},
        {"where": f"{path}:3", "trained": [], "stops": [], "findings": ["ROW-UNREADABLE"]},
    ]
    assert [(item["id"], item["severity"], item["count"], item["where"]) for item in found["findings"]] == [
        ("ROW-UNREADABLE", "error", 1, [f"{path}:3:2"]),
        ("KEYS-IGNORED", "note", 1, [f"{path}:2"]),
    ]
    assert all(set(item) == {"id", "severity", "count", "where", "message", "remedy"} for item in found["findings"])


def test_without_a_file_it_is_the_project_s_data(write_jsonl: Write) -> None:
    done = run()
    assert done.exit_code == 0, done.stderr
    assert "1,980 rows" in done.stdout
    assert "tokenizer: models/encyclopedia-3m; the model's context is 512 tokens" in done.stdout


@pytest.mark.parametrize(("arguments", "said"), [
    (("nothing.jsonl",), "The data does not exist"),
    (
        ("data/example/test.jsonl", "--fix", "b.jsonl", "--json", "--show-mask", "1"),
        "With --fix, --show-mask, --json does nothing",
    ),
    (("data/example/test.jsonl", "--model", "nowhere"), "nowhere"),
])  # fmt: skip
def test_what_cannot_be_said_is_exit_2(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_not_read_of_a_folder_and_a_repair_are_told(write_jsonl: Write, tmp_path: Path) -> None:
    path = write_jsonl("set/train.jsonl", [chat("q", "FranÃ§oise"), chat("q", "FranÃ§oise"), "{"])
    write_jsonl("set/more.jsonl", [])
    done = run(path.parent, "--model", EMBEDDED)
    assert done.exit_code == 1
    assert "warning: in the data folder, more.jsonl is not read [FILES-UNREAD]" in done.stdout
    into = tmp_path / "fixed.jsonl"
    refused = run(path, "--fix", str(into))
    assert (refused.exit_code, into.exists()) == (1, False)
    assert "leave them out: safetrain validate FILE --fix OUT.jsonl --drop-bad" in refused.stderr
    done = run(path, "--fix", str(into), "--drop-bad")
    assert done.exit_code == 0
    assert "wrote 1 of 3 rows" in done.stdout
    assert json.loads(into.read_text(encoding="utf-8")) == chat("q", "Françoise")
    assert run(path, "--fix", str(into)).exit_code == 2


def by_id(*paths: Path) -> dict[str, Finding]:
    found = validate(paths, EMBEDDED).findings
    assert len({finding.id for finding in found}) == len(found)  # each is told once
    return {finding.id: finding for finding in found}


def test_what_the_pipeline_says_of_all_rows_is_said_of_a_file_too(write_jsonl: Write) -> None:
    long = chat("q", "Iron and gold. " * 300)
    rows = [{**chat(f"question {n}", "a"), "id": n, **{f"k{n}-{key}": 1 for key in range(20)}} for n in range(9)]
    path = write_jsonl("train.jsonl", [*rows, rows[2], long])
    write_jsonl("test.jsonl", [chat("Who?", "a")])
    found = by_id(path.parent)
    assert found["REPEATED-ROWS"].where == (f"{path}:10 matches {path}:3",)
    assert (found["BEYOND-CONTEXT"].count, found["BEYOND-CONTEXT"].where) == (1, (f"{path}:11",))
    assert found["KEYS-IGNORED"].message.startswith("unused keys in 10 rows: id, k0-0, k0-1, ")
    assert found["KEYS-IGNORED"].message.endswith(", …")


@pytest.mark.parametrize("content", ["", " \n\t\n", "prompt,completion\n"])
def test_a_shard_without_rows_is_an_error(write_jsonl: Write, tmp_path: Path, content: str) -> None:
    path = write_jsonl("train-0.jsonl", [chat(f"question {n}", "a") for n in range(9)])
    (path.parent / "train-1.jsonl").write_text(content)
    assert by_id(path.parent)["FILE-UNREADABLE"].where == (f"{path.parent}/train-1.jsonl",)


def test_columns_of_the_command_line_are_read_and_repaired_by(tmp_path: Path) -> None:
    path, into = tmp_path / "a.csv", tmp_path / "b.jsonl"
    path.write_text("frage,antwort,id\n" + "".join(f"Wer war {n}?,Niemand war es.,{n}\n" for n in range(3)))
    refused = run(path)
    assert refused.exit_code == 1
    assert "'data.columns={prompt: frage, completion: antwort}' (" in refused.stdout
    assert run(path, "--columns", "{prompt: frage, completion: antwort}").exit_code == 0  # as in params.yaml
    options = "--columns prompt=frage --columns completion=antwort"
    assert run(path, *options.split()).exit_code == 0
    without = run(path, "--fix", str(into))
    assert (without.exit_code, "data.columns={prompt: frage" in without.stderr) == (1, True)
    assert run(path, *options.split(), "--fix", str(into)).exit_code == 0
    assert json.loads(into.read_text().splitlines()[0]) == {"prompt": "Wer war 0?", "completion": "Niemand war es."}
    assert "messages (and system, tools); or prompt" in run(path, "--columns", "frage=prompt").stderr


def test_rows_of_findings_are_dropped(write_jsonl: Write, tmp_path: Path) -> None:
    rows = [chat("Iron?", "Fe."), chat("Who?", "As an AI language model, I cannot know."), chat("Gold?", "[Your Name]")]
    path, into = write_jsonl("a.jsonl", [*rows, chat("Tin?", "Sn."), rows[0]]), tmp_path / "b.jsonl"
    done = run(path, "--fix", str(into), "--drop", "REFUSALS,placeholders")
    assert done.exit_code == 0, done.stderr
    assert "wrote 2 of 5 rows" in done.stdout
    assert into.read_text() == "".join(json.dumps(row) + "\n" for row in (rows[0], chat("Tin?", "Sn.")))
    assert run(into, "--model", EMBEDDED).exit_code == 0
    log = [json.loads(line) for line in (tmp_path / "b.jsonl.log.jsonl").read_text().splitlines()]
    assert [(line["where"], line["reason"]) for line in log if line["what"] == "finding"] == [
        (f"{path}:2", "REFUSALS"), (f"{path}:3", "PLACEHOLDERS"),
    ]  # fmt: skip
    assert "--drop: unknown finding" in run(path, "--fix", str(tmp_path / "c.jsonl"), "--drop", "NO-SUCH").stderr
    assert "--drop does nothing" in run(path, "--drop", "REFUSALS").stderr


def test_a_book_is_validated_as_documents(tmp_path: Path) -> None:
    book = tmp_path / "books" / "a.txt"
    book.parent.mkdir()
    book.write_text("\n<|endoftext|>\n".join(TEXTS[:9]))
    for path in (book, book.parent):
        done = run(path, "--model", EMBEDDED)
        assert done.exit_code == 0, done.output
        tokens, size = sum(map(len, tokenized(TEXTS[:9]))), sum(map(len, TEXTS[:9]))
        assert f"9 documents, {tokens:,} tokens ({tokens - 9:,} labels)\n{size / (tokens - 9):.2f} bytes" in done.stdout
    copy = tmp_path / "book.jsonl"
    book.write_text(f"{TEXTS[0]}\u200b\n<|endoftext|>\n{TEXTS[1]}\n<|endoftext|>\n{TEXTS[1]}")
    assert run(book, "--fix", copy, "--model", EMBEDDED).exit_code == 0
    assert [json.loads(line) for line in copy.read_text().splitlines()] == [{"text": text} for text in TEXTS[:2]]
    book.write_text("\n<|endoftext|>\n".join(TEXTS[:9]))
    (book.parent / "mine.csv").write_text("question,answer\na,b\n")
    assert validate([book.parent], EMBEDDED).count == 1  # texts beside rows are notes about them
    assert validate([book.parent], EMBEDDED, DataSettings(documents=True)).count == 9


Row = dict[str, Any]


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]


def test_everything_at_once(tmp_path: Path) -> None:
    """A table in UTF-16 with mojibake, escapes, repeats and a row that says nothing."""
    source, into = tmp_path / "a.csv", tmp_path / "new" / "b.jsonl"
    cells = [
        ("Who wrote it?", "FranÃ§oise Yip"), ("How warm?", "\x1b[1m20\x1b[0m Â°C\x00"), ("Who?", ""),
        ("Who wrote it?", "Françoise Yip"), ("What is it?", "It’s “good” &amp; naïve: Ã is a letter"),
    ]  # fmt: skip
    text = "question,answer\n" + "".join(f'"{question}","{answer}"\n' for question, answer in cells)
    source.write_bytes(text.encode("utf-16"))
    with pytest.raises(DataError, match=r"1 row cannot be read.*\n.*a\.csv, row 3 \(line 4\)\n.*--drop-bad"):
        Repair(source, into)
    assert not into.parent.exists() or not list(into.parent.iterdir())
    done = Repair(source, into, drop_bad=True)
    assert source.read_bytes() == text.encode("utf-16")
    assert [(row["prompt"], row["completion"]) for row in lines(into)] == [
        ("Who wrote it?", "Françoise Yip"),
        ("How warm?", "20 °C"),
        ("What is it?", "It’s “good” &amp; naïve: Ã is a letter"),
    ]
    log = lines(done.log)
    assert [(line["where"].removeprefix(f"{source}"), line["what"]) for line in log] == [
        (", row 1 (line 2)", "mojibake"), (", row 1 (line 2)", "form"),
        (", row 2 (line 3)", "mojibake"), (", row 2 (line 3)", "invisible"), (", row 2 (line 3)", "form"),
        (", row 3 (line 4)", "dropped"),
        (", row 4 (line 5)", "form"), (", row 4 (line 5)", "duplicate"),
        (", row 5 (line 6)", "form"),
    ]  # fmt: skip
    assert (log[0]["before"], log[0]["after"], log[0]["key"]) == ("FranÃ§oise Yip", "Françoise Yip", "completion")
    assert log[5]["before"] == {"question": "Who?", "answer": None}
    assert log[5]["reason"] == "answer must be a string, not null or an empty cell"
    assert log[7]["reason"] == f"repeats {source}, row 1 (line 2)"
    assert (done.read, done.written) == (5, 3)
    said = done.summary()
    assert "3 of 5 rows" in said
    assert "1  DROPPED" in said


def test_what_is_right_is_not_changed(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    rows = [
        chat("Quoi ?", "Ça va — “très” bien… 中文 🦊 \u00a0 ½"),
        {"text": "a\tb\r\nc"},
        {"prompt": "p", "completion": "c"},
    ]
    source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    done = Repair(source, tmp_path / "b.jsonl")
    assert done.changes == {}
    assert (tmp_path / "b.jsonl").read_bytes() == source.read_bytes()
    assert done.log.read_bytes() == b""


def test_nothing_is_written_over(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a"}\n')
    (tmp_path / "c.jsonl.log.jsonl").write_text("mine")
    (tmp_path / "d.jsonl").symlink_to(tmp_path / "nowhere")
    for into in (source, tmp_path / "c.jsonl", tmp_path / "d.jsonl"):
        with pytest.raises(ConfigError, match="already exists"):
            Repair(source, into)
    assert (source.read_text(), (tmp_path / "c.jsonl.log.jsonl").read_text()) == ('{"text": "a"}\n', "mine")
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(DataError, match="copy cannot be written"):
        Repair(source, source / "b.jsonl")


def test_a_name_is_asked_for_and_options_of_fix_need_it(tmp_path: Path) -> None:
    for name in (Path(), tmp_path / "b.csv"):
        with pytest.raises(ConfigError, match="copy is a JSONL file"):
            Repair(tmp_path / "a.jsonl", name)
    for content, says in (("{}\n", "No row is left"), ("%PDF-1", "a binary file")):
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(DataError, match=says):
            Repair(tmp_path / "a.jsonl", tmp_path / "b.jsonl", drop_bad=True)
    with pytest.raises(ConfigError, match="Without --fix, --drop, --drop-bad does nothing"):
        refuse_idle({"--drop": "REFUSALS", "--drop-bad": True}, "Without")
    refuse_idle({"--drop": "", "--drop-bad": False}, "Without")

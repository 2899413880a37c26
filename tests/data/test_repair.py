"""`safetrain validate FILE --fix OUT`: everything that can be put right is, and every change is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.errors import ConfigError, DataError
from safetrain.data.checks import invisible_character
from safetrain.data.command import Repair, refuse_idle
from tests.conftest import chat

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


def test_what_validation_finds_of_characters_is_gone_from_the_copy(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    pairs = {
        "soft\u00adhyphen": "softhyphen", "zero\u200bwidth": "zerowidth", "turned\u202eround": "turnedround",
        "\ufeffmark": "mark", "می\u200cخواهم": "می\u200cخواهم",
        "page one\fpage\vtwo\x00 FranÃ§oise": "page one\npage\ntwo Françoise",
    }  # fmt: skip
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in pairs))
    Repair(source, tmp_path / "b.jsonl")
    found = [row["text"] for row in lines(tmp_path / "b.jsonl")]
    assert found == list(pairs.values())
    assert not any(map(invisible_character, found))


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


def test_a_name_is_asked_for_and_options_of_fix_need_it(tmp_path: Path) -> None:
    for name in (Path(), tmp_path / "b.xlsx"):
        with pytest.raises(ConfigError, match=r"cannot be written in the format(.|\n)*\.tsv or \.parquet"):
            Repair(tmp_path / "a.jsonl", name)
    for content, says in (("{}\n", "No row is left"), ("%PDF-1", "a binary file")):
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(DataError, match=says):
            Repair(tmp_path / "a.jsonl", tmp_path / "b.jsonl", drop_bad=True)
    with pytest.raises(ConfigError, match="Without --fix, --drop, --drop-bad does nothing"):
        refuse_idle({"--drop": "REFUSALS", "--drop-bad": True}, "Without")
    refuse_idle({"--drop": "", "--drop-bad": False}, "Without")


@pytest.mark.parametrize("suffix", [".json", ".csv", ".tsv", ".parquet"])
def test_the_copy_has_the_format_of_its_name_and_reads_as_the_same_rows(tmp_path: Path, suffix: str) -> None:
    source, into = tmp_path / "a.jsonl", tmp_path / f"b{suffix}"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [chat("One,\ttwo", 'A "quoted"\u2028line\nand another'), {"messages": [*turns, *turns]}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Repair(source, into).written == 2
    assert Repair(into, tmp_path / "c.jsonl").written == 2
    assert lines(tmp_path / "c.jsonl") == rows

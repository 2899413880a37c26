"""`safetrain validate`: what validation would say of any file, without a pipeline."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.plan.validate import validate_files
from tests.conftest import EMBEDDED, ROOT, chat

Write = Callable[..., Path]
SPOKEN = "\x1b]0;title\x07Fe."


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "safetrain.cli", "validate", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_the_json_is_one_object_with_rows_and_findings(write_jsonl: Write) -> None:
    path = write_jsonl("a.jsonl", [chat("Iron?", "Fe."), {**chat("Gold?", "Au."), "id": 7}, "{", chat("Tin?", "Sn.")])
    done = run(str(path), "--model", str(EMBEDDED), "--json", "--show-mask", "3")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["rows"] == [
        {"where": f"{path}:1", "trained": ["Fe.<|end|>"], "stops": ["<|end|>"], "findings": []},
        {"where": f"{path}:2", "trained": ["Au.<|end|>"], "stops": ["<|end|>"], "findings": ["KEYS-IGNORED"]},
        {"where": f"{path}:3", "trained": [], "stops": [], "findings": ["ROW-UNREADABLE"]},
    ]
    assert [(item["id"], item["severity"], item["count"], item["where"]) for item in found["findings"]] == [
        ("ROW-UNREADABLE", "error", 1, [f"{path}:3"]),
        ("KEYS-IGNORED", "note", 1, [f"{path}:2"]),
    ]
    assert all(set(item) == {"id", "severity", "count", "where", "message", "remedy"} for item in found["findings"])


def test_what_is_trained_stands_between_marks_and_nothing_reaches_the_terminal(write_jsonl: Write) -> None:
    path = write_jsonl("a.jsonl", [chat("Iron?", SPOKEN)])
    done = run(str(path), "--model", str(EMBEDDED), "--show-mask", "1")
    assert done.returncode == 0
    assert r"<|user|>Iron?<|end|><|assistant|>⟦\x1b]0;title\x07Fe.<|end|>⟧" in done.stdout
    assert "\x1b" not in done.stdout


def test_without_a_file_it_is_the_project_s_data(write_jsonl: Write) -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    assert "1980 rows" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing.jsonl",), "The data file does not exist"),
        (("data/example/test.jsonl", "--model", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_said_is_exit_2(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_packed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps([{"question": "Iron?", "answer": "Fe."}]).encode()))
    found = validate_files([path], EMBEDDED)
    assert [finding.id for finding in found.findings] == ["COLUMNS-TAKEN"]
    assert found.count == 1


def test_a_file_without_rows_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"%PDF-1.7")
    found = validate_files([path], EMBEDDED)
    assert [finding.id for finding in found.findings] == ["FILE-UNREADABLE"]
    assert "a PDF document" in found.findings[0].message
    assert found.has_errors


def test_what_is_not_read_of_a_folder_and_a_repair_are_told(write_jsonl: Write, tmp_path: Path) -> None:
    path = write_jsonl("set/train.jsonl", [chat("q", "FranÃ§oise"), chat("q", "FranÃ§oise"), "{"])
    write_jsonl("set/more.jsonl", [])
    done = run(str(path.parent), "--model", str(EMBEDDED))
    assert done.returncode == 1
    assert done.stderr == f"not read: {path.parent}/more.jsonl\n"
    into = tmp_path / "fixed.jsonl"
    refused = run(str(path), "--fix", str(into))
    assert (refused.returncode, into.exists()) == (1, False)
    assert "--drop-bad; nothing was written" in refused.stderr
    done = run(str(path), "--fix", str(into), "--drop-bad")
    assert done.returncode == 0
    assert "1 of 3 rows" in done.stdout
    assert "1 of 3 rows are NOT in" in done.stderr
    assert json.loads(into.read_text(encoding="utf-8")) == chat("q", "Françoise")
    assert run(str(path), "--fix", str(into)).returncode == 2

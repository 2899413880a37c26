"""`safetrain evaluate`: any model and adapter, the pipeline's sentences, and none of its files touched."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError, DataError, MachineError, ModelError
from tests.engine.test_fuse import adapter_of

Build = Callable[..., Path]
Write = Callable[..., Path]
FEW = ("--max-new-tokens", "2")


@pytest.fixture
def data(write_jsonl: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_jsonl("mine.jsonl", [{"prompt": f"What is {i}?", "completion": f"It is {i}."} for i in range(4)])


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_an_adapter_is_compared_with_its_own_base(tiny_model: Build, data: Path, tmp_path: Path) -> None:
    base = tiny_model()
    adapter = adapter_of(base, tmp_path / "adapter", size=0.5)
    said = run("--adapter", adapter, "--data", data, *FEW)
    assert said.startswith("Test loss ")
    assert "(95 %, 4 rows)." in said
    assert "\nExact match on 4 test questions: base 0.0 %, tuned 0.0 %." in said
    assert "Forgetting not measured: the base model " in said
    found = json.loads(run("--adapter", adapter, "--data", data, "--json", *FEW))
    assert (found["model"], found["base"], found["adapter"]) == (str(base), str(base), str(adapter))
    beside = found["beside_base"]
    assert (beside["rows"], beside["questions"], beside["answered"]) == (4, 4, 4)
    assert beside["tuned"]["loss"] != beside["base"]["loss"]
    assert beside["samples"][0]["where"] == f"{data}:1"


def test_a_model_is_measured_alone_and_printed_as_json(tiny_model: Build, data: Path) -> None:
    found = json.loads(run("--model", tiny_model(), "--data", data, "--json", "--max-examples", 3, *FEW))
    assert (found["base"], found["beside_base"]) == ("", None)
    assert (found["alone"]["rows"], found["alone"]["answered"]) == (3, 3)
    assert 5 < found["alone"]["score"]["loss"] < 12
    assert 5 < found["alone"]["general_loss"] < 12


def test_two_models_are_compared_by_the_tokens_of_both(tiny_model: Build, data: Path) -> None:
    one, two = tiny_model("one"), tiny_model("two")
    same = run("--model", one, "--base", two, "--data", data, *FEW)
    assert "no clear difference, " in same
    value = json.loads((two / "tokenizer.json").read_text(encoding="utf-8"))
    (two / "tokenizer.json").write_text(json.dumps({**value, "added_tokens": []}), encoding="utf-8")
    with pytest.raises(ConfigError, match="different tokenizers"):
        run("--model", one, "--base", two, "--data", data)


def test_what_cannot_be_done_is_said_before_anything_is_measured(
    tiny_model: Build, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, other = tiny_model("one"), tiny_model("two", tie=False)
    adapter = adapter_of(base, tmp_path / "adapter")
    for arguments, error, text in (
        ((), ConfigError, "nothing to measure"),
        (("--model", base), DataError, "does not exist"),
        (("--model", base, "--adapter", adapter, "--base", other), ConfigError, "two ways to compare"),
        (("--model", other, "--adapter", adapter, "--data", data), ModelError, "trained on another base"),
        (("--model", tmp_path / "none", "--data", data), ModelError, "none"),
        (("--model", base, "--data", tmp_path / "none.jsonl"), DataError, "does not exist"),
        (("--model", base, "--data", tmp_path), DataError, "not a regular file"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            run(*arguments)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"nothing": 1}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        run("--model", base, "--data", tmp_path / "bad.jsonl")
    monkeypatch.setattr("safetrain.engine.tuned.host_room_bytes", lambda _memory: 1000)
    with pytest.raises(MachineError, match="too little memory to measure the model"):
        run("--model", base, "--data", data)
    assert not (tmp_path / "checkpoints_qlora").exists()

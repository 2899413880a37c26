"""What is measured follows from what the stage depends on, the plan and the trained model, not from the clock."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safetrain.core.data.token_rows import Question, token_row
from safetrain.core.model.files import tokenizer_hash
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from stages import evaluate
from tests.conftest import ROOT
from tests.export.test_fuse import adapter_of
from tests.stores import MADE, write_store
from tests.watch.made_run import PLAN, SUMMARY

QUESTIONS = 60
PLANNED = dataclasses.replace(PLAN, test_tokens=20 * 40, answer_tokens=40 * 3, general_tokens=256)


@pytest.fixture
def measured(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Evaluates an adapter on 60 rows with a question each, after a training that went so fast; returns the result."""
    base, source = tiny_model("base"), np.random.default_rng(1)
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    rows = [token_row(source.integers(5, 900, 21).tolist(), [False] * 10 + [True] * 11) for _ in range(QUESTIONS)]
    asked = [Question(row, tuple(rows[row].ids[:10].tolist()), (7, 2), f"{row}?") for row in range(QUESTIONS)]
    made = dataclasses.replace(MADE, tokenizer=tokenizer_hash(base))
    write_store(paths.VALIDATED / "test.tokens.safetensors", rows, made, asked)
    adapter_of(base, paths.ADAPTERS)
    write_record(paths.RECOMMENDED_CONFIG, PLANNED)

    def measure(*values: str, **speed: float) -> dict[str, Any]:
        write_record(paths.SUMMARY, dataclasses.replace(SUMMARY, **speed))  # type: ignore[arg-type]
        words = ["evaluate", f"model.path={base}", "evaluate.max_new_tokens=3", *values]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            evaluate.main()
        assert not ended.value.code
        found: dict[str, Any] = json.loads(paths.EVALUATION.read_text())
        return found

    return measure


def test_the_plan_says_how_much_is_measured_and_max_examples_something_else(
    measured: Callable[..., dict[str, Any]],
) -> None:
    quiet = measured(elapsed_seconds=1.0, tokens_per_second=1e6)
    assert measured(elapsed_seconds=1000.0, tokens_per_second=0.1) == quiet
    assert (quiet["rows"], quiet["rows_available"], quiet["answered"], quiet["questions"]) == (40, 60, 40, 60)
    few = measured("evaluate.max_examples=3")
    assert (few["rows"], few["rows_available"], few["answered"], few["questions"]) == (3, 3, 3, 3)

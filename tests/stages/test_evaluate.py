"""What is measured follows from what the stage depends on, the plan and the trained model, not from the clock."""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.data.token_rows import Question, token_row
from safetrain.core.errors import MachineError
from safetrain.core.model.files import tokenizer_hash
from safetrain.core.records.settings import RELAXED, SHORTER
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from stages import evaluate
from tests.conftest import ROOT
from tests.export.test_fuse import adapter_of
from tests.stores import MADE, write_store
from tests.watch.made_run import PLAN, SUMMARY


def test_the_plan_says_how_much_is_measured_and_max_examples_something_else(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 rows with a question each, after a training that was fast or slow."""
    base = tiny_model("base")
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    rows = [token_row(range(5 + row, 26 + row), [False] * 10 + [True] * 11) for row in range(60)]
    asked = [Question(row, tuple(range(5 + row, 15 + row)), (7, 2), f"{row}?") for row in range(60)]
    made = dataclasses.replace(MADE, tokenizer=tokenizer_hash(base))
    for name in ("test", "valid"):
        write_store(paths.VALIDATED / f"{name}.tokens.safetensors", rows, made, asked)
    for name in ("test", "valid", "train"):
        lines = [json.dumps({"prompt": f"{row}?", "completion": f"{row}"}) + "\n" for row in range(60)]
        (paths.VALIDATED / f"{name}.jsonl").write_text("".join(lines))
    adapter_of(base, paths.ADAPTERS)
    plan = dataclasses.replace(PLAN, test_tokens=20 * 40, answer_tokens=40 * 3, general_tokens=256)
    write_record(paths.RECOMMENDED_CONFIG, plan)

    def measured(seconds: float, *values: str) -> dict[str, Any]:
        write_record(
            paths.SUMMARY, dataclasses.replace(SUMMARY, elapsed_seconds=seconds, tokens_per_second=9 / seconds)
        )
        monkeypatch.setattr(sys, "argv", ["", f"model.path={base}", "evaluate.max_new_tokens=3", *values])
        with pytest.raises(SystemExit) as ended:
            evaluate.main()
        assert not ended.value.code
        found: dict[str, Any] = json.loads(paths.EVALUATION.read_text())
        return found

    quiet, few = measured(1.0), measured(1.0, "evaluate.max_examples=3")
    assert measured(1e4) == quiet
    assert (quiet["rows"], quiet["rows_available"], quiet["answered"], quiet["questions"]) == (40, 60, 40, 60)
    assert (few["rows"], few["rows_available"], few["answered"], few["questions"]) == (3, 3, 3, 3)


def test_the_gpu_watchdog_is_kept_away_as_in_the_training_that_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before mlx is imported; else the evaluation dies of what the training has survived."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    names, found = (*SHORTER, *RELAXED), list[dict[str, str | None]]()
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back after the test
        monkeypatch.delenv(name)

    def as_mlx_is_imported() -> None:
        found.append({name: os.environ.pop(name, None) for name in names})
        raise MachineError("enough")

    monkeypatch.setattr(evaluate, "load_fast_blas", as_mlx_is_imported)
    monkeypatch.setattr(sys, "argv", [""])
    for rungs in ((), ("step 7: shorter",), ("step 7: shorter", "step 9: relaxed")):
        write_record(paths.SUMMARY, dataclasses.replace(SUMMARY, gpu_rungs=rungs))
        with pytest.raises(SystemExit):
            evaluate.main()
    nothing = dict.fromkeys(names)
    assert found == [nothing, nothing | SHORTER, nothing | SHORTER | RELAXED]

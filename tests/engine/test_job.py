"""What a training reads before it begins."""

import dataclasses
from pathlib import Path

import pytest

from safetrain.core.data.token_rows import token_row
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.records.settings import TrainJob
from safetrain.engine.job import LEAST_VALID_TOKENS, load_job
from tests.stores import write_stores
from tests.support.random_models import EMBEDDED
from tests.support.settings import SETTINGS


def test_a_run_that_max_steps_ends_early_validates_on_fewer_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [token_row(range(5, 55), [True] * 50)] * 600
    write_stores(tmp_path / "data" / "validated", EMBEDDED, rows, rows)
    monkeypatch.chdir(tmp_path)
    asked = TrainJob(str(EMBEDDED), SETTINGS, False, MemoryBudget(2**40), None)
    short = dataclasses.replace(asked, settings=dataclasses.replace(SETTINGS, max_steps=1))
    whole, few = (
        load_job(dataclasses.replace(asked, settings=dataclasses.replace(SETTINGS, max_steps=None))),
        load_job(short),
    )
    assert len(whole.valid) == 600
    assert 0.9 * LEAST_VALID_TOKENS < few.valid.tokens <= LEAST_VALID_TOKENS
    assert few.rows.valid_rows_available == 600

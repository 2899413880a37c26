"""What train believes of a plan: a dry run for what it was made of and anything smaller, and nothing more."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import TrainingRows, largest_update
from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.memory.estimate import RunMemory, exact_bytes
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.model.files import read_model_files
from safetrain.core.records.run_state import RunIdentity
from safetrain.core.records.settings import DryRun, Recommendation, TrainJob, TrainSettings, resolve
from safetrain.core.storage.files import read_result
from safetrain.engine.job import Job, memory_of
from tests.conftest import EMBEDDED
from tests.plan.test_recommend import NO_LORA_PINS, OPEN, plan

MEASURED = DryRun(10**8, 10**8, 1.0, "cpu", None)
PLAN = dataclasses.replace(plan(), verified=True, measured=MEASURED)
SETTINGS = resolve(OPEN, NO_LORA_PINS, PLAN.settings)


def measured(settings: TrainSettings = SETTINGS, of: Recommendation = PLAN) -> bool:
    return of.dry_run_peak_bytes is not None and of.covers(settings, of.largest_update)


def test_a_dry_run_speaks_for_the_plan_alone() -> None:
    assert measured()
    assert measured(dataclasses.replace(SETTINGS, learning_rate=1.0))
    assert not measured(dataclasses.replace(SETTINGS, optimizer="muon"))
    for change in ({"batch_size": 32}, {"max_seq_length": 1024}, {"method": "dora"}, {"dequantize_base": False}):
        assert not measured(dataclasses.replace(SETTINGS, **change))
    assert not measured(of=dataclasses.replace(PLAN, verified=False))
    assert not measured(of=dataclasses.replace(PLAN, memory_budget=MemoryBudget(10**8 - 1)))
    assert not measured(dataclasses.replace(SETTINGS, batch_size=8, gradient_accumulation=16))
    alone = dataclasses.replace(PLAN, settings=dataclasses.replace(PLAN.settings, gradient_accumulation=1))
    assert not measured(dataclasses.replace(SETTINGS, gradient_accumulation=4), alone)


def test_a_larger_update_than_was_measured_is_predicted_in_proportion() -> None:
    model, rows = read_model_files(EMBEDDED), TokenRows.of([token_row([1] * n, [True] * n) for n in range(20, 80)])
    settings = dataclasses.replace(SETTINGS, batch_size=16, gradient_accumulation=1, num_epochs=2)
    largest = largest_update(rows, rows.take(slice(3)), 16, 2, None)
    planned = dataclasses.replace(PLAN, settings=settings, largest_update=largest)
    asked = TrainJob("", settings, True, MemoryBudget(10**9), planned)

    def memory(**changes: Any) -> RunMemory:
        own = vars(dataclasses.replace(asked, **changes))
        loaded: dict[str, Any] = {
            "rows": TrainingRows(rows, rows.take(slice(3))),
            "identity": RunIdentity("", "", "", ""),
            "files": model,
        }
        return memory_of(Job(**own, **loaded), "cpu")

    found = memory()
    counted = exact_bytes(found.terms)
    assert 0.9 * 10**8 < found.peak_bytes <= 10**8  # the plan knew the largest update of several orders of the rows
    assert counted < found.mlx_limit_bytes == pytest.approx(0.98 * found.peak_bytes)
    own = largest_update(rows, rows.take(slice(3)), 16, 2, None, (settings.seed,))
    seen = dataclasses.replace(MEASURED, own_update=own, own_peak_bytes=97_654_321)
    met = dataclasses.replace(planned, measured=seen)
    assert memory(planned=met).peak_bytes == 97_654_321
    other = dataclasses.replace(settings, seed=settings.seed + 1)
    assert memory(planned=met, settings=other).peak_bytes != 97_654_321  # another order than was measured
    fewer = dataclasses.replace(planned, largest_update=dataclasses.replace(largest, tokens=largest.tokens // 2))
    larger = memory(planned=fewer)
    assert 1.2 * 10**8 < larger.peak_bytes < 2 * 10**8
    assert found.mlx_limit_bytes < larger.mlx_limit_bytes < larger.peak_bytes
    with pytest.raises(MachineError, match="do not fit"):
        memory(planned=fewer, memory_budget=MemoryBudget(larger.peak_bytes))


def test_a_plan_of_an_older_version_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "recommended_config.json").write_text('{"batch_size": 4}')
    with pytest.raises(ConfigError, match=r"another version of safetrain: it has no settings(.|\n)*'safetrain run'"):
        read_result(tmp_path / "recommended_config.json", Recommendation)

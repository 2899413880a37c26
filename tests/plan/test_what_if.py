"""The same question for a machine one does not have: what fits there, from a config.json."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from safetrain.core.errors import ConfigError
from safetrain.core.model.files import ModelFiles, read_model_plan
from safetrain.plan.estimate_text import print_remedies
from safetrain.plan.what_if import (
    ANY_CPU,
    LENGTHS,
    as_planned,
    cheapest,
    default_run,
    estimate,
    largest_batch,
    machine_of,
    profile_names,
    read_profile,
    remedies,
    with_memory,
)
from tests.conftest import ROOT
from tests.core.test_model_shapes import BIG

PROFILES = ROOT / "conf" / "machine"
GIB = 2**30


@pytest.fixture
def qwen_7b(tmp_path: Path) -> ModelFiles:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BIG["Qwen2.5-7B"][0], "quantization": {"group_size": 64, "bits": 4}}))
    return read_model_plan(path)


def test_every_profile_is_a_machine_with_less_budget_than_memory() -> None:
    assert {"m1-8gb", "m1-16gb", "m1-32gb", "t4-16gb", "h200-141gb"} <= set(profile_names(PROFILES))
    for name in profile_names(PROFILES):
        machine = machine_of(read_profile(name, PROFILES))
        assert machine.backend in ("metal", "cuda", "cpu")
        assert 0.5 < machine.memory_budget_bytes / machine.total_memory_bytes < 1


def test_a_typo_names_the_nearest_machine() -> None:
    with pytest.raises(ConfigError, match="did you mean m1-8gb"):
        read_profile("m1-8g", PROFILES)


def test_more_memory_and_recomputing_fit_more_and_longer_rows_fit_less(qwen_7b: ModelFiles) -> None:
    small, large = (machine_of(read_profile(name, PROFILES)) for name in ("m1-16gb", "m3-64gb"))
    run = default_run(qwen_7b, "metal")
    for tokens in LENGTHS:
        kept, recomputed = (largest_batch(qwen_7b, small, each, tokens) for each in (run, cheapest(run)))
        assert kept <= recomputed
        assert kept <= largest_batch(qwen_7b, large, run, tokens)
    batches = [largest_batch(qwen_7b, small, cheapest(run), tokens) for tokens in LENGTHS]
    assert batches == sorted(batches, reverse=True)
    assert batches[0] > 0


def test_the_same_shape_needs_different_memory_for_different_models(qwen_7b: ModelFiles, tmp_path: Path) -> None:
    """What a table by memory alone cannot say."""
    tiny = dataclasses.replace(qwen_7b, static_bytes=0, num_layers=24, hidden_size=896, intermediate_size=4864)
    eight = with_memory(machine_of(read_profile("m1-8gb", PROFILES)), 8)
    assert not estimate(qwen_7b, eight, default_run(qwen_7b, "metal"), 2, 512).fits
    assert estimate(tiny, eight, default_run(tiny, "metal"), 2, 512).fits


def test_what_the_remedy_says_fits(qwen_7b: ModelFiles) -> None:
    """On CPU a 4-bit base may fit quantized only, which is shown; if blocks must be recomputed too, both are said."""
    machine = dataclasses.replace(ANY_CPU, memory_budget_bytes=20 * 2**30)
    run = default_run(qwen_7b, "cpu")
    planned = as_planned(qwen_7b, machine, run, 1, 512)
    assert (run.dequantize, planned.dequantize) == (True, False)
    assert estimate(qwen_7b, machine, planned, 1, 512).fits
    console = Console(width=200, record=True, file=io.StringIO())
    print_remedies(console, qwen_7b, machine, run, 8, 2048)
    steps = remedies(qwen_7b, machine, run, 8, 2048)
    assert f"do: {' '.join(steps[-1].keys)}" in console.export_text()
    assert [step.estimate.fits for step in steps] == [False] * (len(steps) - 1) + [True]
    assert {"train.dequantize_base=false", "train.gradient_checkpointing=true"} <= set(steps[-1].keys)
    sizes = [step.estimate.needed_bytes for step in steps]
    assert sizes == sorted(sizes, reverse=True)

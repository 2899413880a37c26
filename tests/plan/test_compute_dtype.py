"""The type that a training computes in: who decides it, what it takes, and that nobody is asked for the impossible."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.errors import ConfigError
from safetrain.core.memory.estimate import memory_of_run, total_bytes
from safetrain.core.memory.system import cuda_budget_bytes
from safetrain.core.memory.terms import backend_of, base_bytes
from safetrain.core.model.files import ModelFiles, read_model_files, read_model_plan
from safetrain.core.records.reports import Machine, read_machine
from safetrain.core.records.settings import Recommendation, resolve
from safetrain.core.storage.files import write_record
from safetrain.plan.candidates import compute_dtype_of, usual_dtype
from safetrain.plan.estimate import estimate_of
from safetrain.plan.machine import Probe, machine_of, read_machine_now, read_profile, settle
from safetrain.plan.remedies import what_would_fit
from tests.conftest import EMBEDDED
from tests.core.readings import T4
from tests.plan.test_estimate import PROFILES
from tests.plan.test_published_runs import MISTRAL
from tests.plan.test_recommend import NO_LORA_PINS, OPEN, data, machine, plan

GIB = 2**30
NATIVE = machine(cuda_budget_bytes(T4.device_bytes) / GIB, "cuda")
EMULATED = dataclasses.replace(NATIVE, compute_dtype="float32", quantized_compute_dtype="float32")
PINNED = {name: dataclasses.replace(OPEN, compute_dtype=name) for name in ("float32", "bfloat16", "float16")}


def model_of(folder: Path, bits: int | None = 4, stored: str = "bfloat16") -> ModelFiles:
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {**MISTRAL, "torch_dtype": stored, "max_position_embeddings": 4096}
    config |= {"quantization": {"group_size": 64, "bits": bits}} if bits else {}
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_plan(folder)


@pytest.fixture
def mistral(tmp_path: Path) -> ModelFiles:
    return model_of(tmp_path)


def reason_of(chosen: Recommendation) -> str:
    return chosen.reasons["compute_dtype"]


def test_only_a_base_in_bfloat16_is_cast_and_only_where_its_own_products_are_slow(tmp_path: Path) -> None:
    slow_plain = dataclasses.replace(NATIVE, compute_dtype="float32")
    for bits in (4, None):
        assert usual_dtype(EMULATED, model_of(tmp_path, bits)) == "float32"
        assert usual_dtype(NATIVE, model_of(tmp_path, bits)) is None
        for stored in ("float16", "float32"):
            assert usual_dtype(EMULATED, model_of(tmp_path, bits, stored)) is None
    assert usual_dtype(slow_plain, model_of(tmp_path, None)) == "float32"
    assert usual_dtype(slow_plain, model_of(tmp_path, 4)) is None
    whole, float32 = dataclasses.replace(OPEN, method="pretrain"), model_of(tmp_path, None, "float32")
    found = [compute_dtype_of(whole, each, float32) for each in (NATIVE, EMULATED, machine(16, "cpu"))]
    assert found == ["bfloat16", "float32", None]
    dequantized = dataclasses.replace(OPEN, dequantize_base=True)
    assert compute_dtype_of(dequantized, slow_plain, model_of(tmp_path, 4)) == "float32"


def test_the_plan_takes_the_type_of_the_machine_and_says_why(mistral: ModelFiles) -> None:
    slow, native = (plan(model=mistral, machine=each, data=data(longest=250)) for each in (EMULATED, NATIVE))
    assert (slow.compute_dtype, native.compute_dtype) == ("float32", None)
    assert "emulates bfloat16" in reason_of(slow)
    assert "stored base" in reason_of(native)
    assert resolve(OPEN, NO_LORA_PINS, slow).compute_dtype == "float32"
    assert "CPU always computes in float32" in reason_of(plan())
    for name, train in PINNED.items():
        chosen = plan(train, model=mistral, machine=EMULATED, data=data(longest=250))
        assert (chosen.compute_dtype, reason_of(chosen)) == (name, "set by you")
        assert resolve(train, NO_LORA_PINS, chosen).compute_dtype == name


def test_float32_is_planned_with_more_memory(mistral: ModelFiles) -> None:
    """The same shape: twice the scales and biases, twice the activations; float16 takes what bfloat16 takes."""
    pins = {name: dataclasses.replace(train, batch_size=1, max_seq_length=256) for name, train in PINNED.items()}
    chosen = {name: plan(train, model=mistral, machine=NATIVE) for name, train in pins.items()}
    terms = {name: {term.name: term.size_bytes for term in each.memory_terms} for name, each in chosen.items()}
    wide, narrow = terms["float32"], terms["bfloat16"]
    scales = sum(t.size_bytes for t in mistral.tensors if t.dtype == "BF16")
    assert narrow["base weights"] == mistral.static_bytes
    assert wide["base weights"] == mistral.static_bytes + scales
    assert wide["stored activations"] == pytest.approx(2 * narrow["stored activations"], rel=1e-6)
    assert terms["float16"] == narrow
    assert chosen["float32"].predicted_peak_bytes > 1.1 * chosen["bfloat16"].predicted_peak_bytes
    plain = model_of(mistral.folder / "plain", None)
    assert base_bytes(plain, backend_of(plain, "cuda", False)) == 2 * plain.parameters
    assert base_bytes(plain, backend_of(plain, "cuda", False, compute_dtype="float32")) == 4 * plain.parameters


def test_sixteen_bits_on_a_cpu_are_refused_before_anything_is_spent() -> None:
    for name in ("bfloat16", "float16"):
        with pytest.raises(ConfigError, match="A CPU computes everything in float32") as caught:
            plan(PINNED[name])
        assert "train.compute_dtype" in str(caught.value)
    chosen = plan(PINNED["float32"])
    settings = resolve(PINNED["float16"], NO_LORA_PINS, chosen)
    model, budget = read_model_files(EMBEDDED), chosen.memory_budget
    with pytest.raises(ConfigError, match="A CPU computes"):
        memory_of_run(model, settings, chosen.largest_update, "cpu", budget, None)
    assert memory_of_run(model, settings, chosen.largest_update, "cuda", budget, None).peak_bytes > 0


def test_what_was_found_slow_stays_so_on_this_device_with_this_mlx(tmp_path: Path) -> None:
    slow = Probe(
        "cuda", "Tesla T4", 0, 15 * GIB, T4.device_bytes, 2**28, "", False, "", 4000.0, compute_dtype="float32",
        quantized_compute_dtype="float32",
    )  # fmt: skip
    before = read_machine_now(slow)
    assert (before.compute_dtype, before.quantized_compute_dtype) == ("float32", "float32")
    close = read_machine_now(dataclasses.replace(slow, quantized_compute_dtype=None))
    assert settle(close, before) == before
    assert settle(before, close) == before
    for change in ({"device": "NVIDIA L4"}, {"mlx": "9"}):
        other = dataclasses.replace(close, compute_dtype=None, **change)  # type: ignore[arg-type]
        assert settle(other, before).compute_dtype is None
    write_record(tmp_path / "machine.json", before)
    assert read_machine(tmp_path / "machine.json") == before


def test_an_estimate_for_a_t4_is_of_float32(mistral: ModelFiles) -> None:
    there: Machine = machine_of(read_profile("t4-16gb", PROFILES))
    assert usual_dtype(there, mistral) == "float32"
    wide, narrow = estimate_of(mistral, there, compute_dtype=usual_dtype(there, mistral)), estimate_of(mistral, there)
    assert total_bytes(wide.terms) > 1.1 * total_bytes(narrow.terms)
    assert "train.compute_dtype=bfloat16" in what_would_fit(wide.but(rows=8, tokens=16384))[0]
    for name, other in (("float64", there), ("bfloat16", machine())):
        with pytest.raises(ConfigError):
            estimate_of(mistral, other, compute_dtype=name)

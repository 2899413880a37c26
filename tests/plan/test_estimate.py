"""`safetrain estimate`: what fits, here and on a machine that is only described."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.memory.estimate import beyond_limit_bytes, memory_of_run, predicted_peak, total_bytes
from safetrain.core.memory.terms import Setup
from safetrain.core.model.files import ModelFiles, read_model_files, read_model_plan
from safetrain.core.model.shapes import PRESETS
from safetrain.core.records.reports import Machine
from safetrain.core.records.settings import SMALLEST, LoraSettings, Recommendation, Shape, resolve
from safetrain.plan.candidates import Estimate, usual_dtype, what_would_fit
from safetrain.plan.child import cuda_budget_bytes
from safetrain.plan.estimate import estimate_of, facts_of, model_to_estimate
from safetrain.plan.machine import EXAMPLE, described_machines, machine_named
from tests.conftest import EMBEDDED, ROOT
from tests.core.readings import T4
from tests.core.test_model_files import BIG
from tests.plan.test_recommend import NO_LORA_PINS, OPEN, data, plan
from tests.plan.test_recommend import machine as usual_machine


@pytest.fixture(autouse=True)
def in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def qwen_7b(tmp_path: Path) -> ModelFiles:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BIG["Qwen2.5-7B"][0], "quantization": {"group_size": 64, "bits": 4}}))
    return read_model_plan(path)


def test_every_profile_is_a_machine_with_less_budget_than_memory() -> None:
    assert {"m1-8gb", "m1-16gb", "m1-32gb", "t4-16gb", "h200-141gb"} <= set(described_machines())
    for name in described_machines():
        machine = machine_named(name)
        assert machine.backend in ("metal", "cuda", "cpu")
        assert 0.5 < machine.memory_budget_bytes / machine.total_memory_bytes < 1
    with pytest.raises(ConfigError, match=r"one of .*m1-8gb"):
        machine_named("m1-8g")
    with pytest.raises(ModelError, match="huge"):
        model_to_estimate(Path("huge"))


def test_a_machine_of_one_s_own_joins_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"m1-8gb[^$]*describe it there, e\.g\. mine: "):
        machine_named("mine")
    (tmp_path / "conf").mkdir()
    own = tmp_path / "conf" / "machines.yaml"
    for text, said in (
        ("mine: {chip: mine", "cannot be read"), ("- mine", "cannot be read"), ("mine: {chip: x}", "cannot be read"),
        (EXAMPLE.replace("14", "much"), "cannot be read: could not convert"),
    ):  # fmt: skip
        own.write_text(text)
        with pytest.raises(ConfigError, match=said):
            machine_named("mine")
    own.write_text(EXAMPLE)
    assert (machine_named("mine").backend, machine_named("m1-8gb").backend) == ("cpu", "metal")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_estimated_before_it_is_made(name: str) -> None:
    assert model_to_estimate(Path(name)).parameters == PRESETS[name].parameters


def test_the_command_says_by_its_exit_code_whether_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    def code(*words: str) -> int:
        return CliRunner().invoke(app, ["estimate", *words], catch_exceptions=False).exit_code

    assert code("85m", "--method", "pretrain", "--tokens", "2048", "--machine", "m1-8gb") == 0
    assert code("800m", "--method", "pretrain", "--tokens", "2048", "--machine", "m1-8gb") == 1
    assert code("models/encyclopedia-3m", "--machine", "m1-8gb") == 0
    assert code("models/encyclopedia-3m", "--memory-gb", "0.15", "--machine", "m1-8gb", "--batch-size", "64") == 1


def test_the_time_of_a_step_is_that_of_its_products_and_unknown_for_a_described_machine() -> None:
    model = read_model_plan(EMBEDDED)
    slow, fast = (dataclasses.replace(usual_machine(8, "cpu"), gemm_gflops=speed) for speed in (50.0, 100.0))
    seconds = [facts_of(estimate_of(model, machine))["step_seconds"] for machine in (slow, fast)]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.01)
    assert facts_of(estimate_of(model, usual_machine(8, "cpu")))["step_seconds"] is None


def shortage(folder: Path, bits: int | None, gib: float, length: int = 1024) -> Estimate:
    """A 7B on a machine that has too little memory for it."""
    quantization = {"quantization": {"group_size": 64, "bits": bits}} if bits else {}
    (folder / "config.json").write_text(json.dumps({**BIG["Qwen2.5-7B"][0], **quantization}))
    model = read_model_plan(folder)
    lora = LoraSettings(16, 2.0, 0.0, model.num_layers, ("all-linear",))
    settings = dataclasses.replace(SMALLEST, lora=lora, gradient_checkpointing=True, max_seq_length=length)
    return Estimate(model, settings, "metal", machine=usual_machine(gib, "metal"))


def test_where_nothing_fits_what_would_is_named_with_its_memory(tmp_path: Path) -> None:
    (on_disk,) = what_would_fit(shortage(tmp_path, 4, 7.0, 4096))
    assert on_disk.startswith("train.stream_base=true (")
    asked = shortage(tmp_path, 4, 3.0, 4096).but(stream_base=True)
    found = what_would_fit(asked)
    assert not asked.fits
    assert found[0].startswith("train.max_seq_length=")
    assert all(text.endswith("GiB)") for text in found)
    length = int(found[0].split("=")[1].split(" ")[0])
    assert (asked.but(max_seq_length=length).fits, asked.but(max_seq_length=length + 32).fits) == (True, False)
    four = asked.but(batch_size=4, max_seq_length=length)
    assert [text[:16] for text in what_would_fit(four)] == ["train.batch_size"]
    (smaller,) = what_would_fit(shortage(tmp_path, 2, 0.6, 256))
    assert smaller.startswith("a smaller base model")


GIB = 2**30
LLAMA_3B = {
    "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "vocab_size": 128256,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_1B = {
    **LLAMA_3B, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64, "num_hidden_layers": 16,
}  # fmt: skip
QWEN_HALF_B = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_32B = {
    "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40,
    "num_key_value_heads": 8, "num_hidden_layers": 64, "vocab_size": 152064,
}  # fmt: skip
QWEN_7B, LLAMA_8B = BIG["Qwen2.5-7B"][0], BIG["Llama-3.1-8B"][0]
MISTRAL = {**LLAMA_8B, "model_type": "mistral", "vocab_size": 32000}  # 7B
QV, ALL = ("self_attn.q_proj", "self_attn.v_proj"), ("all-linear",)
# MakazhanAlpamys/Soup #663, M1 of 8 GB, macOS 26.6, mlx-lm's trainer: LoRA of rank 8 on q and v of every block, one row
# of 64 positions, activations kept, no accumulation, no best adapter in memory.
MEASURED = [(QWEN_7B, 4.922e9), (LLAMA_8B, 5.154e9), (LLAMA_3B, 2.236e9), (QWEN_HALF_B, 0.497e9)]
NAMES = ["Qwen2.5-7B", "Llama-3.1-8B", "Llama-3.2-3B", "Qwen2.5-0.5B"]


def four_bits(config: dict[str, Any], folder: Path) -> ModelFiles:
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "torch_dtype": "bfloat16", "quantization": {"group_size": 64, "bits": 4}}))
    return read_model_plan(path)


@pytest.mark.parametrize(("config", "measured_bytes"), MEASURED, ids=NAMES)
def test_the_closed_form_is_just_above_an_m1(config: dict[str, Any], measured_bytes: float, tmp_path: Path) -> None:
    """The smallest apart, whose logits are half of its peak and are made once here for so few labels."""
    model = four_bits(config, tmp_path)
    lora = LoraSettings(8, 2.0, 0.0, model.num_layers, QV)
    terms = predicted_peak(Setup(model, dataclasses.replace(SMALLEST, lora=lora), "metal"), Shape(1, 64, 64, 64))
    most = 1.3 if config is QWEN_HALF_B else 1.05
    assert 1.0 <= total_bytes(terms) / measured_bytes <= most


@pytest.mark.parametrize(
    ("config", "tokens", "measured_mib"),
    [(MISTRAL, 512, 1113), (MISTRAL, 1024, 1593), (QWEN_HALF_B, 256, 385), (QWEN_HALF_B, 1024, 830),
     (QWEN_HALF_B, 4096, 1164)],
)  # fmt: skip
def test_a_base_on_disk_needs_what_was_measured(
    config: dict[str, Any], tokens: int, measured_mib: int, tmp_path: Path
) -> None:
    """On a CPU: benchmarks/results/bench_stream.md. With long rows mlx's limit is below the peak."""
    model = four_bits(config, tmp_path)
    lora = LoraSettings(8, 2.0, 0.0, model.num_layers, ALL)
    run = Setup(model, dataclasses.replace(SMALLEST, lora=lora, stream_base=True), "cpu")
    shape = Shape(1, tokens, tokens, tokens, tokens)
    assert total_bytes(predicted_peak(run, shape)) / 2**20 / measured_mib == pytest.approx(1, abs=0.04)
    assert (beyond_limit_bytes(run, shape) > 0) == (tokens == 4096)


@pytest.mark.parametrize(
    ("config", "tokens"), [(MISTRAL, 256), (MISTRAL, 512), (LLAMA_3B, 512), (LLAMA_1B, 512), (QWEN_HALF_B, 512)]
)
def test_eight_gigabytes_train_it(config: dict[str, Any], tokens: int, tmp_path: Path) -> None:
    """Rank 8 on all seven linear layers of every block, recomputed, accumulating."""
    model, m1 = four_bits(config, tmp_path), machine_named("m1-8gb")
    assert recomputed(model, m1).but(max_seq_length=tokens).fits


def test_an_8b_on_eight_gigabytes_says_how(tmp_path: Path) -> None:
    """It was trained there with q and v alone, at a peak of 4.80 GiB: all seven layers need the base on disk."""
    model, m1 = four_bits(LLAMA_8B, tmp_path), machine_named("m1-8gb")
    assert not recomputed(model, m1).fits
    assert what_would_fit(recomputed(model, m1))[0].startswith("train.stream_base=true (")
    model, m1 = four_bits(MISTRAL, tmp_path), machine_named("m1-32gb")  # mlx-lm's own advice
    settings = dataclasses.replace(SMALLEST, lora=LoraSettings(8, 2.0, 0.0, 4, QV), max_seq_length=2048)
    assert Estimate(model, settings, "metal", machine=m1).fits


def test_what_did_not_fit_does_not(tmp_path: Path) -> None:
    """Qwen3-8B with 4,096 tokens of context was stopped at 1 % free (Ilcoach/loom); llama3 8B of 5.5 GB froze an M1
    (ollama/ollama #5680). Neither leaves room for a training, nor does a 32B on 16 GB."""
    m1, m4 = (machine_named(name) for name in ("m1-8gb", "m4-16gb"))
    context_bytes = 4096 * 36 * 8 * 128 * 2 * 2
    assert int(4.682 * GIB) + context_bytes > m1.memory_budget.mlx_bytes
    assert int(5.5e9) > m1.memory_budget.mlx_bytes
    big = four_bits(QWEN_32B, tmp_path)
    for machine in (m1, m4):
        assert recomputed(big, machine).but(max_seq_length=128).fits is False


def recomputed(model: ModelFiles, machine: Machine) -> Estimate:
    lora = LoraSettings(8, 2.0, 0.0, model.num_layers, ALL)
    settings = dataclasses.replace(SMALLEST, lora=lora, gradient_checkpointing=True)
    return Estimate(model, settings, machine.backend, machine=machine)


GIB = 2**30
NATIVE = usual_machine(cuda_budget_bytes(T4.device_bytes) / GIB, "cuda")
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


def test_the_plan_takes_the_type_of_the_machine_and_says_why(mistral: ModelFiles) -> None:
    slow, native = (plan(model=mistral, machine=each, data=data(longest=250)) for each in (EMULATED, NATIVE))
    assert (slow.settings.compute_dtype, native.settings.compute_dtype) == ("float32", None)
    assert "emulates bfloat16" in reason_of(slow)
    assert "stored base" in reason_of(native)
    assert resolve(OPEN, NO_LORA_PINS, slow.settings).compute_dtype == "float32"
    assert "CPU always computes in float32" in reason_of(plan())
    for name, train in PINNED.items():
        chosen = plan(train, model=mistral, machine=EMULATED, data=data(longest=250))
        assert (chosen.settings.compute_dtype, reason_of(chosen)) == (name, "set by you")
        assert resolve(train, NO_LORA_PINS, chosen.settings).compute_dtype == name


def test_sixteen_bits_on_a_cpu_are_refused_before_anything_is_spent() -> None:
    for name in ("bfloat16", "float16"):
        with pytest.raises(ConfigError, match="A CPU computes everything in float32") as caught:
            plan(PINNED[name])
        assert "train.compute_dtype" in str(caught.value)
    chosen = plan(PINNED["float32"])
    settings = resolve(PINNED["float16"], NO_LORA_PINS, chosen.settings)
    model, budget = read_model_files(EMBEDDED), chosen.memory_budget
    with pytest.raises(ConfigError, match="A CPU computes"):
        memory_of_run(model, settings, chosen.largest_update, "cpu", budget, None)
    assert memory_of_run(model, settings, chosen.largest_update, "cuda", budget, None).peak_bytes > 0


def test_an_estimate_for_a_t4_is_of_float32(mistral: ModelFiles) -> None:
    there: Machine = machine_named("t4-16gb")
    assert usual_dtype(there, mistral) == "float32"
    wide = estimate_of(mistral, there)
    narrow = wide.but(compute_dtype=None)
    assert total_bytes(wide.terms) > 1.1 * total_bytes(narrow.terms)
    assert "train.compute_dtype=bfloat16" in what_would_fit(wide.but(batch_size=8, max_seq_length=16384))[0]


def test_on_cuda_attention_s_wider_rows_are_counted() -> None:
    """Rows of 96 tokens are padded to 128 in attention alone; rows of 128 are not."""
    settings, found = dataclasses.replace(SMALLEST, lora=LoraSettings(8, 2.0, 0.0, 2, QV)), list[int]()
    files = read_model_files(EMBEDDED)
    for width in (96, 128):
        shape = Shape(4, width, 4 * width, 64)
        on_cuda, elsewhere = (
            total_bytes(predicted_peak(Setup(files, settings, way), shape)) for way in ("cuda", "gpu")
        )
        found.append(on_cuda - elsewhere)
    assert found[0] > found[1] == 0

"""The static terms are exact, the sum is safe, and what train was given is checked."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from mlx.utils import tree_flatten

from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.memory.estimate import memory_of_run, require_fit
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.memory.terms import (
    METAL_HEAD_SIZES,
    Setup,
    Shape,
    base_bytes,
    lora_parameters,
    optimizer_state_bytes,
    tiles_bytes,
    trained_parameters,
)
from safetrain.core.model.files import TensorHeader, read_model_files
from safetrain.core.records.settings import LoraSettings, TrainSettings
from safetrain.engine.adapters import make_trainable
from safetrain.engine.model import open_base
from safetrain.engine.update import BlockOptimizer, of_mlx
from tests.conftest import EMBEDDED
from tests.engine.exact import SETTINGS
from tests.stores import worst_update

ALL = LoraSettings(16, 2.0, 0.0, 6, ("all-linear",))
MODEL = read_model_files(EMBEDDED)
CPU = Setup(MODEL, ALL, "cpu", dequantize=True)


@pytest.mark.parametrize(("bits", "method", "targets", "num_layers"), [
    (None, "lora", ("all-linear",), 1), (3, "dora", ("q_proj", "mlp.down_proj"), 2), (4, "lora", ("q_proj",), 2),
    (4, "dora", ("all-linear",), 1), (None, "full", ("all-linear",), 1), (None, "full", ("all-linear",), 2),
])  # fmt: skip
def test_base_and_trained_weights_are_counted_exactly(
    tiny_model: Callable[..., Path], bits: int | None, method: str, targets: tuple[str, ...], num_layers: int
) -> None:
    folder = tiny_model(bits=bits)
    model, lora = read_model_files(folder), LoraSettings(5, 2.0, 0.0, num_layers, targets)
    opened = open_base(folder, dequantize=True)
    setup = dataclasses.replace(CPU, model=model, lora=lora, method=method)
    stored = base_bytes(dataclasses.replace(setup, method="lora"))
    assert stored == sum(value.nbytes for _, value in tree_flatten(opened.module.parameters()))
    make_trainable(opened, method, lora, 1)
    trained = sum(value.size for _, value in tree_flatten(opened.module.trainable_parameters()))
    assert trained_parameters(setup) == trained
    experts = TensorHeader("model.layers.0.mlp.switch_mlp.up_proj.weight", "BF16", (8, 100, 64), 8 * 100 * 64 * 2)
    mixture = dataclasses.replace(MODEL, num_layers=1, tensors=(experts,), quantization_bits=None)
    assert lora_parameters(mixture, dataclasses.replace(ALL, num_layers=1)) == 16 * 8 * 164


@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "lora") for name in ("adam", "adafactor", "muon", "sgd")), ("adamw", "pretrain"), ("muon", "pretrain")],
)
def test_the_state_of_each_optimizer_is_counted(tiny_model: Callable[..., Path], name: str, method: str) -> None:
    """To the byte except Adafactor, whose few numbers are rounded up."""
    folder, lora = tiny_model(bits=4 if method == "lora" else None), dataclasses.replace(ALL, rank=8, num_layers=2)
    opened = open_base(folder, dequantize=True)
    make_trainable(opened, method, lora, 1)
    optimizer = BlockOptimizer(of_mlx(name, 0.0, whole_model=method == "pretrain"))
    optimizer.init(opened.module.trainable_parameters())
    kept = [value for key, value in tree_flatten(optimizer.state) if key not in ("step", "learning_rate")]
    setup = Setup(read_model_files(folder), lora, "cpu", method, optimizer=name)
    found, expected = optimizer_state_bytes(setup), sum(v.nbytes for v in kept)
    assert expected <= found <= (1.1 if name == "adafactor" else 1.0) * expected


@pytest.mark.parametrize("head_size", METAL_HEAD_SIZES)
def test_attention_on_metal_has_tiles_of_few_rows_and_never_all_scores(head_size: int) -> None:
    """What mlx-metal 0.32.4 allocates: three tiles of at most 1024 x 1024 a row and head, and three float32 sums."""
    model = dataclasses.replace(MODEL, num_heads=32, num_kv_heads=8, head_dim=head_size)
    metal = Setup(model, ALL, "metal", compute_dtype="float16")

    def bytes_of(rows: int, tokens: int) -> int:
        return tiles_bytes(metal, Shape(rows, tokens, False))

    def sums(tokens: int) -> int:
        return 4 * tokens * (32 + 8 + 8) * head_size

    assert bytes_of(1, 512) == 3 * 2 * 32 * 512**2 + sums(512)
    assert bytes_of(1, 8192) == 3 * 2 * 32 * 1024**2 + sums(8192)
    assert bytes_of(64, 512) <= 2**28 + sums(64 * 512)


def test_a_run_is_checked_against_the_budget_and_the_model() -> None:
    def check(settings: TrainSettings, rows: int, budget_bytes: int) -> None:
        largest, budget = worst_update(rows, 512), MemoryBudget(budget_bytes)
        require_fit(memory_of_run(MODEL, settings, largest, "cpu", budget, None), settings, largest, budget)

    check(SETTINGS, 64, 10**9)
    with pytest.raises(MachineError, match="do not fit"):
        check(dataclasses.replace(SETTINGS, batch_size=512), 512, 10**9)
    with pytest.raises(ConfigError, match="Quantized weights cannot be trained in full"):
        check(dataclasses.replace(SETTINGS, method="full"), 64, 10**9)
    with pytest.raises(ConfigError, match="longer than the model's context"):
        check(dataclasses.replace(SETTINGS, max_seq_length=513), 64, 10**12)

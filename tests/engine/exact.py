"""Small helpers of the exactness tests: random rows, a prepared model, gradients as one vector."""

import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.adapters import set_adapter_weights
from safetrain.engine.backend import name_now
from safetrain.engine.batches import BatchLayout, Update, fill, make_batch
from safetrain.engine.model import BaseModel
from safetrain.engine.update import Gradients, prepare
from tests.support.settings import SETTINGS as STILL

LORA = STILL.lora  # without dropout
SETTINGS = dataclasses.replace(STILL, lora=dataclasses.replace(LORA, dropout=0.1))
ON_GPU = name_now() != "cpu"  # SAFETRAIN_TEST_GPU=1, on a machine that has one
GPU_TOLERANCE = 1e-3  # relative; a GPU sums in another order, a virtual Mac's in yet another
ONE_LIST = BatchLayout(10**6)
LAYOUTS = {
    "one list": ONE_LIST,
    "two lists at a time": BatchLayout(10**6, shards=2),
    "one padded rectangle": BatchLayout(10**6, rectangles=True),
    "rectangles of 640 tokens": BatchLayout(640, rectangles=True),
    "row by row": BatchLayout(1),
    "rectangles": BatchLayout(128, rectangles=True),
    "lists of 100 tokens": BatchLayout(100),
    "pairs of lists of 100 tokens": BatchLayout(100, shards=2),
}
# The model's own attention, as for a model that takes no lists
OWN_WAY = ("one padded rectangle", "rectangles", "rectangles of 640 tokens")


def rows_of(*lengths: int, seed: int = 5) -> TokenRows:
    """Random rows, the second half of each trained."""
    source = np.random.default_rng(seed)
    return TokenRows.of(
        [token_row(source.integers(5, 2048, n).tolist(), [index >= n // 2 for index in range(n)]) for n in lengths]
    )


def prepared(folder: Path, settings: TrainSettings = STILL) -> tuple[BaseModel, Gradients]:
    """A model whose trained matrices are all random: at LoRA's initial zeros half of the gradient would vanish."""
    model, gradients = prepare(folder, settings)
    mx.random.seed(11)
    weights = [
        (name, w + 0.1 * mx.random.normal(w.shape)) for name, w in tree_flatten(model.module.trainable_parameters())
    ]
    set_adapter_weights(model, dict(weights))
    model.module.train()
    return model, gradients


def within(on_cpu: float) -> float:
    """The tolerance of a comparison: that of a CPU, or GPU_TOLERANCE."""
    return GPU_TOLERANCE if ON_GPU else on_cpu


def update_of(data: TokenRows, layout: BatchLayout) -> Update:
    """All of ``data`` as one update; on a GPU in rectangles."""
    if ON_GPU:
        layout = dataclasses.replace(layout, rectangles=True, shards=1)
    groups = list(fill(data, sorted(range(len(data)), key=lambda row: -len(data[row])), layout))
    assert sorted(row for group in groups for row in group) == list(range(len(data)))
    batches = tuple(make_batch(data, group, layout) for group in groups)
    labels = sum(row.labels for row in data)
    return Update(data, batches, labels, 1, 1)


def loss_and_gradient(
    model: BaseModel, gradients: Gradients, data: TokenRows, layout: BatchLayout = ONE_LIST
) -> tuple[float, np.ndarray]:
    """Summed loss and the gradient of the mean, as one vector."""
    if layout in [LAYOUTS[name] for name in OWN_WAY]:
        gradients = Gradients(dataclasses.replace(model, packing_refusal="asked to pad"), STILL.seed)
    loss, gradient = gradients.of(update_of(data, layout), 3)
    return float(np.array(loss)), flat(gradient)


def flat(tree: Any) -> np.ndarray:
    """Every number of a tree, in the order of the names."""
    return np.concatenate([np.array(part).ravel() for _, part in sorted(tree_flatten(tree))]).astype(np.float64)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Relative to the other's length."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))

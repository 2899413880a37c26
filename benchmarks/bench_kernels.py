"""Kernels that an update launches on Metal, counted in mlx's graph, beside the compiled step of `mlx_lm.lora`.

    python -m benchmarks.bench_kernels [--show]

The graph is that of a GPU, built on the CPU and never evaluated, so no Mac is needed: a node is a launch unless it is
one of VIEWS, which only describe an array anew; a concatenation is a launch for each of its inputs. Copies that mlx
makes of views that are not contiguous are not in the graph, on either side. Widths are small, because the count does
not depend on them; the vocabulary is a real one, because it decides the number of chunks of the loss. ``--show`` tells
the most frequent nodes of each.
"""

import dataclasses
import functools
import io
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.machine import write_result
from safetrain.core.data.token_rows import TokenRows, token_row
from tests.support.random_models import TINY, build_model
from tests.support.settings import SETTINGS

# They describe an array anew and launch nothing, unless what they describe is not contiguous: that is not in the graph.
VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends", "ExpandDims", "Flatten",
    "NumberOfElements", "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
}  # fmt: skip
COPIES_EACH = "Concatenate"  # launches a copy for each of its inputs
NODE = re.compile(r'^\{ (\d+) \[label ="([^"]*)", shape=rectangle\]; \}$|^"\w+" -> (\d+)$', re.MULTILINE)
DEPTHS, TOKENS, VOCABULARY, RANK = (8, 32), 512, 32_768, 8
# At commit 5e05ea9, before the work on this count: gradient, optimizer.
BEFORE = {(8, False): (2714, 2465), (8, True): (3538, 2465), (32, False): (9986, 9857), (32, True): (13282, 9857)}


def main() -> None:
    """One row for each depth, kept and recomputed."""
    rows: list[list[object]] = []
    for depth in DEPTHS:
        for recomputed in (False, True):
            with tempfile.TemporaryDirectory() as scratch:
                model = {**TINY, "num_hidden_layers": depth, "vocab_size": VOCABULARY}
                folder = build_model(Path(scratch) / "model", bits=4, bfloat16=True, **model)
                gradient, optimizer = counts(folder, depth, recomputed=recomputed)
                theirs = counts_of_mlx_lm(folder, depth, recomputed=recomputed)
            if "--show" in sys.argv:
                for name, found in (("gradient", gradient), ("optimizer", optimizer), ("mlx_lm", theirs)):
                    print(depth, recomputed, name, found.most_common(24))
            now, before = (gradient.total(), optimizer.total()), BEFORE[depth, recomputed]
            rows.append([depth, "recomputed" if recomputed else "kept", *before, sum(before), *now, sum(now),
                         theirs.total()])  # fmt: skip
    header = ["blocks", "activations", "gradient before", "optimizer before", "in all before", "gradient", "optimizer",
              "in all", "mlx_lm.lora, compiled"]  # fmt: skip
    notes = [
        f"An update of one row of {TOKENS} tokens, rank {RANK} on all seven linear layers, a 4-bit base in bfloat16, "
        f"{VOCABULARY:,} entries in the vocabulary. Not counted as launches: {', '.join(sorted(VIEWS))}."
    ]
    write_result("bench_kernels", "Kernels launched by an update on Metal, by its graph", header, rows, notes)


def counts(folder: Path, depth: int, *, recomputed: bool) -> tuple[Counter[str], Counter[str]]:
    """Launches of the gradient with its norm, and of the optimizer, of the second update."""
    import mlx.core as mx
    from mlx.utils import tree_map

    from safetrain.core.data.row_order import Cursor
    from safetrain.engine.batches import update_at
    from safetrain.engine.layout import training_layout
    from safetrain.engine.optimizer import optimizer_of
    from safetrain.engine.trainable import prepare
    from safetrain.engine.update import apply_gradient, norm_of

    lora = dataclasses.replace(SETTINGS.lora, rank=RANK, num_layers=depth)
    settings = dataclasses.replace(SETTINGS, lora=lora, gradient_checkpointing=recomputed, dequantize_base=False)
    rows = TokenRows.of([token_row(range(5, TOKENS + 6), [True] * (TOKENS + 1))])
    with as_on_metal():
        model, gradients = prepare(folder, settings)
        optimizer = optimizer_of(settings)
        optimizer.init(model.module.trainable_parameters())
        model.module.train()
        parameters = model.module.trainable_parameters()
        mx.eval(parameters, optimizer.state)
        layout = training_layout(model, 1, rows.inputs())
        update = update_at(rows, Cursor(0, 0), 1, 1, layout)
        with only_built():
            loss, gradient = gradients.of(update, 0)
            found = kernels_by_name(loss, gradient, norm_of(gradient))
        ones = tree_map(mx.ones_like, parameters)
        mx.eval(ones)
        with only_built():
            apply_gradient(model, optimizer, ones, 2.0, 1e-3, 1.0)
            return found, kernels_by_name(model.module.trainable_parameters(), optimizer.state)


def counts_of_mlx_lm(folder: Path, depth: int, *, recomputed: bool) -> Counter[str]:
    """The same of the step of mlx_lm/tuner/trainer.py, which is compiled as a whole."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model: Any = load_model(folder)[0]
    model.freeze()
    linear_to_lora_layers(model, depth, {"rank": RANK, "scale": 2.0, "dropout": 0.0})
    original = type(model.layers[0]).__call__
    if recomputed:
        grad_checkpoint(model.layers[0])  # for all of the class
    optimizer = optim.Adam(1e-3)
    optimizer.init(model.trainable_parameters())
    model.train()
    state = [model.state, optimizer.state, mx.random.state]
    mx.eval(state)
    loss_and_gradient = nn.value_and_grad(model, default_loss)

    @functools.partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
        (loss, tokens), gradient = loss_and_gradient(model, batch, lengths)
        optimizer.update(model, gradient)
        return loss, tokens

    try:
        with only_built():
            made = step(mx.arange(5, TOKENS + 6)[None], mx.array([[0, TOKENS]]))
            return kernels_by_name(*made, model.trainable_parameters(), optimizer.state)
    finally:
        type(model.layers[0]).__call__ = original


def kernels_by_name(*trees: Any) -> Counter[str]:
    """How many kernels computing these arrays, or trees of arrays, launches, by mlx's name for the operation."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    written = io.StringIO()
    mx.export_to_dot(written, *(leaf for _, leaf in tree_flatten(list(trees)) if isinstance(leaf, mx.array)))
    names, found = dict[str, str](), Counter[str]()
    for node, name, into in NODE.findall(written.getvalue()):
        if node:
            names[node] = name
            found[name] += name not in VIEWS and name != COPIES_EACH
        elif names[into] == COPIES_EACH:
            found[COPIES_EACH] += 1
    return found


@contextmanager
def as_on_metal() -> Iterator[None]:
    """Let the engine take Metal's paths."""
    with mock.patch("safetrain.engine.backend.name_now", return_value="metal"):
        yield


@contextmanager
def only_built() -> Iterator[None]:
    """Let nothing be computed, so that the graph stays, and let mx.fast make one node, as it does on a GPU.

    A scan stands in for each, and another for its backward pass: mlx never fuses it with its neighbours.
    """
    import mlx.core as mx
    import mlx.nn as nn

    def scan(x: mx.array, *_: Any, **__: Any) -> mx.array:
        return _one_node(lambda x: mx.cumsum(x, axis=-1))(x)

    def cross_entropy(logits: mx.array, _targets: mx.array) -> mx.array:
        return _one_node(lambda logits: logits.max(axis=-1))(logits)

    fused = {"rms_norm": scan, "layer_norm": scan, "rope": scan, "cross_entropy": cross_entropy}
    with ExitStack() as stack:
        for name, function in fused.items():
            stack.enter_context(mock.patch.object(mx.fast, name, function))
        stack.enter_context(mock.patch.object(nn.losses, "cross_entropy", cross_entropy))  # as it is on a GPU
        for name in ("eval", "async_eval"):
            stack.enter_context(mock.patch.object(mx, name))
        yield


def _one_node(forward: Callable[..., Any]) -> Any:
    import mlx.core as mx

    function: Any = mx.custom_function(forward)

    @function.vjp
    def backward(primal: mx.array, cotangent: mx.array, _output: mx.array) -> mx.array:
        return mx.depends([mx.cummax(primal, axis=-1)], [cotangent])[0]

    return function


if __name__ == "__main__":
    main()

"""Prepares a model of mlx-lm for this engine, and finds out what it does not support.

Attention over packed rows, SwiGLU and the gated delta rule are replaced in the files of mlx-lm that define the model,
which import them by name. A model is split into a trunk, which computes hidden states, and a head, so that logits are
computed for labels only. Packed rows and the split are each tested on a few tokens, whatever the model's name, and not
used if they change the model's results. A refusal is not an error.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.gated_delta import gated_delta_update

from safetrain.core.memory.terms import HEAD_SLICES
from safetrain.core.records.settings import FEWEST_LABELS
from safetrain.engine.backend import device
from safetrain.engine.cpu import kernels
from safetrain.engine.layers import dequantized, recomputed
from safetrain.engine.row_attention import Block, PackedRows, block_attention, padded_attention
from safetrain.engine.upstream.loading import FOREIGN, clip_once, complete

Answer = TypeVar("Answer")
Head = Callable[[mx.array], mx.array]  # hidden states (tokens, width) to logits (tokens, vocabulary)

TOLERANCE, TOLERANCE_16_BIT = 1e-2, 5e-2  # largest rounding difference, relative to the largest number
SETTING, NUMBER = (bool, int, float, str, type(None)), ("layer_idx", "idx", "layer_id", "layer_number")
PROBE_ROWS = ((1, 2, 3, 5, 7, 11, 13, 17), (2, 3, 5))
PROBE_BLOCKS = (Block(0, 8, 1, 8), Block(8, 11, 1, 3))


class Refusal(NotImplementedError):
    """The model cannot compute in the requested way; the message says why."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an error from a model's code into a Refusal with its first line. Wrap only calls into the model."""
    try:
        yield
    except Refusal:
        raise
    except FOREIGN as error:
        raise Refusal(f"{type(error).__name__}: {error}".partition("\n")[0]) from error


def asked(call: Callable[..., Any], *arguments: Any) -> mx.array:
    """Call a model and evaluate what it returns; raises Refusal."""
    with refusals():
        values = call(*arguments)
        mx.eval(values)
    if not isinstance(values, mx.array):
        raise Refusal(f"it returns {type(values).__name__}, not an array")
    return values


def are_close(found: Sequence[mx.array], expected: Sequence[mx.array], share: float = TOLERANCE) -> bool:
    """Whether numbers agree to within ``share`` (in 16 bits TOLERANCE_16_BIT) of the largest one. NaN never agrees."""
    pairs = [(numbers(one), numbers(other)) for one, other in zip(found, expected, strict=True)]
    share = share if expected[0].dtype == mx.float32 else TOLERANCE_16_BIT
    largest = max(np.abs(other).max() for _, other in pairs)
    with np.errstate(invalid="ignore"):
        return all(one.shape == other.shape and np.abs(one - other).max() <= share * largest for one, other in pairs)


def numbers(values: mx.array) -> np.ndarray:
    """Copy to numpy, in float32."""
    return np.array(values.astype(mx.float32))


def through_few_blocks(module: Any, ask: Callable[[], Answer]) -> Answer:
    """Call ``ask`` with the model in evaluation mode; raises Refusal.

    It first tries only some blocks, at least one of each kind, because a large model takes long.
    """
    was_training = module.training
    module.eval()  # dropout would change the results, and use up random numbers
    try:
        with few_blocks(module) as fewer:
            try:
                return ask()
            except Refusal:
                if not fewer:
                    raise
        return ask()
    finally:
        module.train(was_training)


def refusal_of(module: Any, ask: Callable[[], None]) -> str:
    """Why ``ask`` raises Refusal, even with all blocks; empty if it does not."""
    try:
        through_few_blocks(module, ask)
    except Refusal as refusal:
        return str(refusal)
    return ""


@contextmanager
def few_blocks(module: Any) -> Iterator[bool]:
    """Inside this context, keep only the first blocks that include every kind; yields whether any are left out.

    Models that store their blocks elsewhere keep them all.
    """
    trunk: Any = getattr(module, "model", None)
    blocks = trunk.get("layers") if isinstance(trunk, dict) else None  # mlx's modules are dicts, without properties
    if not isinstance(blocks, list) or list(map(id, blocks)) != list(map(id, module.layers)):
        yield False
        return
    kinds = [_kind(block) for block in blocks]
    count = max(kinds.index(kind) for kind in kinds) + 1
    trunk.layers = blocks[:count]
    try:
        yield count < len(blocks)
    finally:
        trunk.layers = blocks


def _kind(block: Any) -> list[tuple[str, str]]:
    """The parts of a block with their classes and settings, except the block's number."""
    parts = []
    for name, part in block.named_modules():
        own = {key: value for key, value in vars(part).items() if isinstance(value, SETTING) and key not in NUMBER}
        parts.append((name, f"{type(part).__name__} {sorted(own.items())}"))
    return sorted(parts)


class PackedRowsCache:
    """Stands in for a key-value cache, from which mlx-lm's layers read positions; each token is a row of length 1.

    Model code sees (tokens, 1) ids, rotates each token by its own offset, and passes this object to the attention.
    """

    def __init__(self, rows: PackedRows) -> None:
        self.rows = rows
        self.offset = rows.offsets

    def make_mask(self, _length: int, *, return_array: bool = False, window_size: int | None = None) -> int | None:
        """Return how many tokens a query sees, in place of a mask; None: all tokens before it."""
        del return_array
        return window_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return both unchanged: nothing is cached."""
        return keys, values


def packed_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's attention function, which also takes a ``PackedRowsCache``, and on a GPU holds no matrix of scores."""
    if not isinstance(cache, PackedRowsCache):
        if cache is None and sinks is None and isinstance(mask, str) and not device().on_cpu:  # "causal"
            return padded_attention(queries, keys, values, scale)
        return scaled_dot_product_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    if sinks is not None:
        raise Refusal("its attention has sinks")
    if not isinstance(mask, int | None):
        raise Refusal("its attention has its own mask")
    outputs = [
        block_attention(block, scale, mask)(*(x[block.start : block.stop] for x in (queries, keys, values)))
        for block in cache.rows.blocks
    ]
    return mx.concatenate(outputs)


def call_packed(call: Callable[..., mx.array], layers: int, ids: mx.array, rows: PackedRows) -> mx.array:
    """Run a model or its trunk on (tokens,) ids laid out as in ``rows``; returns (tokens, features)."""
    return call(ids[:, None], cache=[PackedRowsCache(rows)] * layers).squeeze(1)


def call_padded(call: Callable[..., mx.array], ids: mx.array, rows: PackedRows) -> mx.array:
    """Run a model or its trunk on (tokens,) ids padded to one rectangle; returns (tokens, features)."""
    (block,) = rows.blocks
    values = call(ids.reshape(block.rows, block.width))
    return values.reshape(-1, values.shape[-1])


def fast_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """mlx-lm's SwiGLU; on a CPU, a version with powers of 2 in place of exponentials."""
    return kernels.swiglu(gate, x) if device().on_cpu else swiglu(gate, x)


def delta_rule_in_stretches(
    q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, a_log: mx.array, dt_bias: mx.array,
    state: mx.array | None = None, mask: mx.array | None = None, *, use_kernel: bool = True, **how: Any,
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """mlx-lm's gated delta rule (Qwen3-Next, Qwen3.5, Kimi Linear), with less memory for its gradient.

    mlx-lm keeps the intermediate results of all n tokens: gigabytes per block at usual widths. In stretches of sqrt(n)
    tokens, which the backward pass recomputes, it keeps those of only 2 sqrt(n) tokens.
    """
    if use_kernel or mask is not None:
        return gated_delta_update(q, k, v, a, b, a_log, dt_bias, state, mask, use_kernel=use_kernel, **how)
    step: Any = functools.partial(gated_delta_update, mask=None, use_kernel=False, **how)
    if state is None:
        state = mx.zeros((q.shape[0], *v.shape[2:], q.shape[-1]), mx.float32)
    tokens, outputs = q.shape[1], list[mx.array]()
    size = math.isqrt(max(1, tokens - 1)) + 1
    for start in range(0, tokens, size):
        stretch = [each[:, start : start + size] for each in (q, k, v, a, b)]
        values, state = recomputed(step, 0)(*stretch, a_log, dt_bias, state)
        outputs.append(values)
    return mx.concatenate(outputs, axis=1), state


OURS = (
    (scaled_dot_product_attention, packed_attention),
    (swiglu, fast_swiglu),
    (gated_delta_update, delta_rule_in_stretches),
)


def replace(module: Any) -> bool:
    """Put our functions into the mlx-lm files that define ``module``; returns whether attention is among them."""
    names = {kind.__module__ for _, part in module.named_modules() for kind in type(part).__mro__}
    files = [sys.modules[name] for name in names if name.startswith("mlx_lm.models.")]
    for file in files:
        for name, value in list(vars(file).items()):
            for theirs, ours in OURS:
                if value is theirs:
                    setattr(file, name, ours)
    return any(value is packed_attention for file in files for value in vars(file).values())


@dataclass(frozen=True)
class SplitModel:
    """A model as ``head()(trunk(ids))``; ids have shape (rows, tokens), hidden states (rows, tokens, width)."""

    trunk: Callable[..., mx.array]
    layer: Any  # the head's linear layer, or the embedding
    project: Head  # multiplies hidden states by the layer's weight
    finish: Head  # the model's last change of its logits: none, a cap, or a scale
    vocabulary: int
    labels_at_once: int = FEWEST_LABELS  # in a chunk of logits, at least

    def head(self) -> Head:
        """The head for one pass, with its weights dequantized once, not for every chunk."""
        if not self.has_slices:
            return lambda hidden: self.finish(self.project(hidden))
        slices = list(self.slices())
        return lambda hidden: self.finish(mx.concatenate([hidden @ weight.T for weight in slices], axis=-1))

    @property
    def has_slices(self) -> bool:
        """Whether the head can be dequantized slice by slice."""
        return type(self.layer) in kernels.PER_USE.values() and "bias" not in self.layer

    def slices(self, *, backwards: bool = False) -> Iterator[mx.array]:
        """Yield the head's weight in slices of its rows, dequantized to float32, the type of all numbers on a CPU.

        Each slice is evaluated immediately, so that its temporary arrays, three times its size, are freed before the
        next slice.
        """
        rows = self.layer.weight.shape[0]
        size = max(1, rows // HEAD_SLICES)
        starts = range(0, rows, size)
        for start in reversed(starts) if backwards else starts:
            some = dequantized(self.layer, slice(start, start + size)).astype(mx.float32)
            mx.eval(some)
            yield some

    @property
    def matrix(self) -> mx.array | None:
        """The head's matrix (vocabulary, width), if it can be trained; None if it is quantized or has a bias."""
        return self.layer.weight if type(self.layer) in (nn.Linear, nn.Embedding) and "bias" not in self.layer else None

    def head_of(self, matrix: mx.array) -> Head:
        return lambda hidden: self.finish(hidden @ matrix.T)


def adapt(module: Any) -> tuple[str, SplitModel | None]:
    """Freeze the model, install this engine's functions, and find out what the model does not support.

    Returns why it cannot pack rows of different lengths into one list of tokens, empty if it can, and the split model,
    None if it cannot be split. Rows are packed on a CPU only.
    """
    complete(module)
    module.freeze()
    module.eval()
    clip_once(module)
    has_attention, packing = replace(module), ""
    if device().on_cpu:
        packing = packing_refusal(module) if has_attention else "its attention is not mlx-lm's"
    try:
        return packing, split(module)
    except Refusal:
        return packing, None


def packing_refusal(module: Any) -> str:
    """Why rows cannot be packed; empty if packing leaves the results unchanged."""

    def ask() -> None:
        call = trunk_of(module) or module  # the head sees one token at a time
        alone = [asked(call, mx.array([row]))[0] for row in PROBE_ROWS]
        offsets = mx.concatenate([mx.arange(len(row)) for row in PROBE_ROWS])
        ids, rows = mx.array([*PROBE_ROWS[0], *PROBE_ROWS[1]]), PackedRows(offsets, PROBE_BLOCKS)
        packed = asked(call_packed, call, len(module.layers), ids, rows)
        if not are_close([packed[block.start : block.stop] for block in PROBE_BLOCKS], alone):
            raise Refusal("packing rows changes the results")

    return refusal_of(module, ask)


def trunk_of(module: Any) -> Any:
    """The part that turns ids into hidden states; None if it cannot be separated."""
    trunk = getattr(module, "model", None)
    return trunk if callable(trunk) else None


def split(module: Any) -> SplitModel:
    """Split a model into trunk and head; raises Refusal if the model does more than call one after the other.

    mlx-lm's models call the two ``model`` and ``lm_head``, or use the embedding as the head. Some also cap the logits
    (Gemma 2), or scale them (Cohere, Granite).
    """
    trunk = trunk_of(module)
    owner, embedding = getattr(module, "lm_head", None), getattr(trunk, "embed_tokens", None)
    layer: Any = embedding if owner is None else owner
    project = getattr(embedding, "as_linear", None) if owner is None else owner
    if trunk is None or not callable(project):  # Talkie's head is an array
        raise Refusal("its trunk and head have other names than in most models")
    ids = mx.array(PROBE_ROWS[:1])

    def split_of() -> SplitModel:
        parts, logits = asked(lambda: project(trunk(ids))), asked(module, ids)
        for finish in _finishes(module):
            if mx.array_equal(finish(parts), logits):
                return SplitModel(trunk, layer, project, finish, logits.shape[-1])
        raise Refusal("its head alone does not give its logits")

    return through_few_blocks(module, split_of)


def _finishes(module: Any) -> tuple[Head, ...]:
    """What the model may do to its logits, according to its arguments in mlx-lm."""
    names = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    cap, scale, divisor = (getattr(getattr(module, "args", None), name, None) or 1.0 for name in names)
    return (
        lambda logits: logits,
        lambda logits: mx.tanh(logits / cap) * cap,
        lambda logits: logits * scale,
        lambda logits: logits / divisor,
    )

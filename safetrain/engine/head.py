"""Splits a model into what makes hidden states and the head that makes logits, so that the head sees labels only.

The first part also learns to take rows of different lengths as one list of tokens (engine/row_attention.py). Both are
found by comparing numbers on a few tokens, never by the model's name; a model that differs keeps its own way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from safetrain.core.memory.terms import FLOAT32, head_slice_bytes
from safetrain.engine.activations import swiglu
from safetrain.engine.backend import device
from safetrain.engine.batches import Shard
from safetrain.engine.cross_entropy import Head
from safetrain.engine.frozen import EmbeddingDequantizedPerUse, LinearDequantizedPerUse, dequantized
from safetrain.engine.rebind import rebind
from safetrain.engine.row_attention import Block, PackedRows, PackedRowsCache, Way, packed_attention

LogitsTransform = Callable[[mx.array], mx.array]  # what is done to logits after the head

Answer = TypeVar("Answer")

SETTING, NUMBER = (bool, int, float, str, type(None)), ("layer_idx", "idx", "layer_id", "layer_number")
PROBE_ROWS = ((1, 2, 3, 5, 7, 11, 13, 17), (2, 3, 5))
REFUSALS = (TypeError, ValueError, AttributeError, NotImplementedError, IndexError, KeyError, RuntimeError)
TOLERANCE, TOLERANCE_16_BIT = 1e-2, 5e-2  # largest difference, relative to the largest number


@dataclass(frozen=True)
class SplitModel:
    """``head()(trunk(ids))`` is the model; ids (rows, tokens), hidden states (rows, tokens, width)."""

    trunk: Callable[..., mx.array]
    head: Callable[
        [], Head
    ]  # made for one pass: quantized weights are dequantized once in it, not once a chunk; it also
    # caps or scales the logits, where the model does
    vocabulary: int


def split(module: Any) -> SplitModel | None:
    """The two parts, or None when the model does more than apply one after the other.

    Models of mlx-lm name them ``model`` and ``lm_head``, or apply the embedding once more. Some also cap the logits
    (Gemma 2), or scale them (Cohere, Granite).
    """
    trunk = getattr(module, "model", None)
    if not callable(trunk):
        return None
    head = getattr(module, "lm_head", None)
    if head is None:
        head = getattr(getattr(trunk, "embed_tokens", None), "as_linear", None)
    if not callable(head):  # Talkie's is an array
        return None
    ids = mx.array(PROBE_ROWS[:1])

    def finish_of() -> tuple[LogitsTransform, int] | None:
        parts, whole = head(trunk(ids)), module(ids)
        finish = next((each for each in _finishes(module) if _is_same(each(parts), whole)), None)
        return None if finish is None else (finish, whole.shape[-1])

    found = through_few_blocks(module, finish_of)
    if found is None:
        return None
    finish, vocabulary = found
    owner = module.lm_head if head is getattr(module, "lm_head", None) else trunk.embed_tokens
    owner = getattr(owner, "embedding", owner)  # under a NoisyEmbedding
    return SplitModel(trunk, lambda: _head_of(owner, head, finish), vocabulary)


def _finishes(module: Any) -> Iterator[LogitsTransform]:
    """What the model may do to its logits, by the names that mlx-lm's arguments have."""
    yield lambda logits: logits
    arguments = getattr(module, "args", None)
    cap, scale, divisor = (
        getattr(arguments, name, None) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
    )
    if cap:
        yield lambda logits: mx.tanh(logits / cap) * cap
    if scale:
        yield lambda logits: logits * scale
    if divisor:
        yield lambda logits: logits / divisor


def _is_same(one: mx.array, other: mx.array) -> bool:
    return one.shape == other.shape and bool(mx.array_equal(one, other).item())


def _head_of(owner: Any, head: Head, finish: LogitsTransform) -> Head:
    if not isinstance(owner, (LinearDequantizedPerUse, EmbeddingDequantizedPerUse)) or "bias" in owner:
        return lambda hidden: finish(head(hidden))
    slices = _dequantized_slices(owner)
    return lambda hidden: finish(mx.concatenate([hidden @ weight.T for weight in slices], axis=-1))


def _dequantized_slices(owner: Any) -> list[mx.array]:
    """The head's weight in float32, as all numbers are where weights are dequantized per use: on CPU.

    Slice by slice, and now: what a slice is made of, three times its size, is gone before the next, and before logits.
    """
    rows, quantized_width = owner.weight.shape
    row_bytes = FLOAT32 * quantized_width * 32 // owner.bits
    size, slices = max(1, head_slice_bytes(rows * row_bytes) // row_bytes), []
    for start in range(0, rows, size):
        slices.append(dequantized(owner, slice(start, start + size)).astype(mx.float32))
        mx.eval(slices[-1])
    return slices


def enable_packing(module: Any) -> bool:
    """Let the model's attention take lists of rows, and on CPU its SwiGLU be fast; whether it gives the same numbers.

    What mlx-lm does with the model elsewhere is not touched: the attention acts on a ``PackedRowsCache`` only.
    """
    here = device()
    if here.avoids_exponentials:
        rebind(module, {"swiglu": swiglu})
    changed = rebind(module, {"scaled_dot_product_attention": packed_attention(scaled_dot_product_attention)})
    return changed > 0 and packing_is_exact(module, here.attention_ways)


def packing_is_exact(module: Any, ways: Sequence[Way] = tuple(Way)) -> bool:
    """Whether rows in one list give the numbers that each gives alone, in these ways of attention."""
    return bool(through_few_blocks(module, lambda: agree(module, ways)))


def through_few_blocks(module: Any, ask: Callable[[], Answer | None]) -> Answer | None:
    """What a few tokens through the model say; None where the model refuses.

    Through few of its blocks, one of each kind at least, if it lets us: a large model takes long.
    """
    was_training = module.training
    module.eval()  # dropout would make numbers differ, and use up random ones
    try:
        with few_blocks(module) as fewer, suppress(*REFUSALS):
            return ask()
        return ask() if fewer else None
    except REFUSALS:
        return None
    finally:
        module.train(was_training)


@contextmanager
def few_blocks(module: Any) -> Iterator[bool]:
    """Inside, the model has the first of its blocks alone, up to where each kind has been seen; whether it has fewer.

    Models that keep their blocks elsewhere keep them all.
    """
    trunk: Any = getattr(module, "model", None)
    blocks: Any = getattr(trunk, "layers", None)
    if not isinstance(blocks, list) or [id(block) for block in blocks] != [id(block) for block in module.layers]:
        yield False
        return
    kinds = [_kind(block) for block in blocks]
    kept = max(kinds.index(kind) for kind in kinds) + 1
    trunk.layers = blocks[:kept]
    try:
        yield kept < len(blocks)
    finally:
        trunk.layers = blocks


def _kind(block: Any) -> tuple[tuple[str, str, str], ...]:
    """What a block is made of, and its settings but for its number."""
    found = []
    for name, part in block.named_modules():
        settings = {key: value for key, value in vars(part).items() if isinstance(value, SETTING) and key not in NUMBER}
        found.append((name, type(part).__name__, str(sorted(settings.items(), key=str))))
    return tuple(sorted(found))


def call_packed(call: Callable[..., mx.array], layers: int, ids: mx.array, rows: PackedRows) -> mx.array:
    """Run a model or its trunk on (tokens,) ids that lie as ``rows`` says; returns (tokens, features)."""
    return call(ids[:, None], cache=[PackedRowsCache(rows)] * layers).squeeze(1)


def call_padded(call: Callable[..., mx.array], shard: Shard) -> mx.array:
    """The same for a model that takes no lists, of a part that is one rectangle."""
    block = shard.layout.blocks[0]
    values = call(shard.inputs.reshape(block.rows, block.width))
    return values.reshape(-1, values.shape[-1])


def agree(module: Any, ways: Sequence[Way]) -> bool:
    """Whether rows in one list give the numbers that each gives alone; raises one of REFUSALS where the model does."""
    trunk = getattr(module, "model", None)
    call = trunk if callable(trunk) else module  # the head sees each token alone
    alone = mx.concatenate([call(mx.array([row]))[0] for row in PROBE_ROWS])
    tolerance = (TOLERANCE if alone.dtype == mx.float32 else TOLERANCE_16_BIT) * mx.abs(alone.astype(mx.float32)).max()
    return all(_is_close(_packed(call, len(module.layers), way), alone, tolerance) for way in ways)


def _packed(call: Callable[..., mx.array], layers: int, way: Way) -> mx.array:
    """The rows in one list."""
    flat = [token for row in PROBE_ROWS for token in row]
    offsets = mx.array([place for row in PROBE_ROWS for place in range(len(row))])
    blocks, start = [], 0
    for row in PROBE_ROWS:
        blocks.append(Block(start, start + len(row), 1, len(row), way=way))
        start += len(row)
    return call_packed(call, layers, mx.array(flat), PackedRows(offsets, tuple(blocks)))


def _is_close(one: mx.array, other: mx.array, tolerance: mx.array) -> bool:
    return one.shape == other.shape and bool(
        (mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max() <= tolerance).item()
    )

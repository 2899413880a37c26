"""Prepares a model of mlx-lm for this engine, and finds out what it does not support.

A model is split into a trunk, which makes hidden states, and a head, which makes logits, for labels only. The split
and packed rows are compared with the model itself on a few tokens; what gives other numbers is not used.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from safetrain.engine.backend import device
from safetrain.engine.cpu.kernels import EmbeddingDequantizedPerUse, LinearDequantizedPerUse
from safetrain.engine.layers import dequantized
from safetrain.engine.row_attention import Block, PackedRows, Way
from safetrain.engine.upstream.functions import call_packed, replace
from safetrain.engine.upstream.layers import clip_once, complete
from safetrain.engine.upstream.probing import (
    Refusal,
    are_close,
    asked,
    few_words,
    numbers,
    through_few_blocks,
    tolerance_of,
    trunk_of,
)

Head = Callable[[mx.array], mx.array]  # hidden states (tokens, width) to logits (tokens, vocabulary)
LogitsTransform = Callable[[mx.array], mx.array]  # applied to logits after the head
HEAD_SLICES = 32  # in which a head is dequantized
PROBE_ROWS = ((1, 2, 3, 5, 7, 11, 13, 17), (2, 3, 5))


@dataclass(frozen=True)
class SplitModel:
    """A model as ``head()(trunk(ids))``; ids (rows, tokens), hidden states (rows, tokens, width).

    Each pass makes a head, which dequantizes its weights once, not for every chunk. It also caps or scales the logits,
    if the model does.
    """

    trunk: Callable[..., mx.array]
    head: Callable[[], Head]
    vocabulary: int
    matrix: "HeadMatrix | None"  # if the head only multiplies by it


@dataclass(frozen=True)
class HeadMatrix:
    """A head as a function of its matrix, so that the matrix can be trained."""

    now: Callable[[], mx.array]  # (vocabulary, width)
    head_of: Callable[[mx.array], Head]


@dataclass(frozen=True)
class Adaptation:
    """How this engine runs a model. A refusal says why it cannot pack rows, or split the model; empty if it can."""

    packing_refusal: str  # rows are packed into one list of tokens; if refused, padded
    split: SplitModel | None  # None if refused: logits are computed for all tokens
    split_refusal: str

    def describe(self) -> str:
        """How rows and logits are computed, for the first lines of a training."""
        packed = "rows packed without padding" if device().packs_without_padding else "rows padded to a few lengths"
        rows = f"rows padded ({self.packing_refusal})" if self.packing_refusal else packed
        return f"{rows}, logits for {f'all tokens ({self.split_refusal})' if self.split_refusal else 'labels only'}"


def adapt(module: Any) -> Adaptation:
    """Freeze the model, install this engine's functions, and find out what the model does not support."""
    complete(module)
    module.freeze()
    module.eval()
    clip_once(module)
    has_attention = replace(module)
    packing = packing_refusal(module, device().attention_ways) if has_attention else "its attention is not mlx-lm's"
    try:
        return Adaptation(packing, split(module), "")
    except Refusal as refusal:
        return Adaptation(packing, None, str(refusal))


def packing_refusal(module: Any, ways: Sequence[Way] = tuple(Way)) -> str:
    """Why packed rows give other numbers than single rows, by any of these ways of attention; empty if they do not.

    This is found by comparing both on a few tokens, never by the model's name.
    """

    def ask() -> str:
        call = trunk_of(module) or module  # the head sees one token at a time
        alone = [asked(call, mx.array([row]))[0] for row in PROBE_ROWS]
        largest = max(float(abs(numbers(values)).max()) for values in alone)
        offsets = mx.array([place for row in PROBE_ROWS for place in range(len(row))])
        ids = mx.array([token for row in PROBE_ROWS for token in row])
        for way in ways:
            blocks, start = list[Block](), 0
            for row in PROBE_ROWS:
                blocks.append(Block(start, start + len(row), 1, len(row), way=way))
                start += len(row)
            packed = asked(call_packed, call, len(module.layers), ids, PackedRows(offsets, tuple(blocks)))
            found = [packed[block.start : block.stop] for block in blocks]
            if not are_close(found, alone, largest, tolerance_of(alone[0].dtype)):
                return "packed rows give other numbers"
        return ""

    try:
        return through_few_blocks(module, ask)
    except Refusal as refusal:
        return str(refusal)


def split(module: Any) -> SplitModel:
    """Split a model into trunk and head; raises Refusal if it does more than apply one after the other.

    Models of mlx-lm call them ``model`` and ``lm_head``, or use the embedding as the head. Some also cap the logits
    (Gemma 2), or scale them (Cohere, Granite).
    """
    trunk = trunk_of(module)
    if trunk is None:
        raise Refusal("its parts have other names")
    owner = getattr(module, "lm_head", None)
    embedding = getattr(trunk, "embed_tokens", None)
    head = getattr(embedding, "as_linear", None) if owner is None else owner
    if not callable(head):  # Talkie's is an array
        raise Refusal("its head is not a layer")
    ids = mx.array(PROBE_ROWS[:1])
    weights: Any = embedding if owner is None else owner

    def finish_of() -> tuple[LogitsTransform | None, int]:
        with few_words(module, {id(part): part for part in (embedding, weights)}.values()):
            parts, logits = asked(lambda: head(trunk(ids))), asked(module, ids)
            fitting = (finish for finish in _finishes(module) if mx.array_equal(finish(parts), logits))
            return next(fitting, None), logits.shape[-1]

    finish, width = through_few_blocks(module, finish_of)
    if finish is None:
        raise Refusal("its head alone does not give its logits")
    vocabulary = max(width, weights.weight.shape[0] if "weight" in weights else 0)
    return SplitModel(trunk, lambda: _head_of(weights, head, finish), vocabulary, _matrix_of(weights, finish))


def _finishes(module: Any) -> Iterator[LogitsTransform]:
    """Yield what the model may do to its logits, according to its arguments in mlx-lm."""
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


def _matrix_of(owner: Any, finish: LogitsTransform) -> HeadMatrix | None:
    """The head's matrix; None if it is quantized or has a bias."""
    if type(owner) not in (nn.Linear, nn.Embedding) or "bias" in owner:
        return None
    return HeadMatrix(lambda: owner.weight, lambda matrix: lambda hidden: finish(hidden @ matrix.T))


def _head_of(owner: Any, head: Head, finish: LogitsTransform) -> Head:
    if not isinstance(owner, (LinearDequantizedPerUse, EmbeddingDequantizedPerUse)) or "bias" in owner:
        return lambda hidden: finish(head(hidden))
    slices = _dequantized_slices(owner)
    return lambda hidden: finish(mx.concatenate([hidden @ weight.T for weight in slices], axis=-1))


def _dequantized_slices(owner: Any) -> list[mx.array]:
    """The head's weight in float32, the type of all numbers on a CPU, where weights are dequantized per use.

    Each slice is computed at once: its temporary arrays, three times its size, are freed before the next slice.
    """
    rows = owner.weight.shape[0]
    size, slices = max(1, rows // HEAD_SLICES), []
    for start in range(0, rows, size):
        slices.append(dequantized(owner, slice(start, start + size)).astype(mx.float32))
        mx.eval(slices[-1])
    return slices

"""Splits a model into what makes hidden states and the head that makes logits, so that the head sees labels only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from safetrain.engine.cross_entropy import Head

PROBE_IDS = ((1, 2, 3, 5, 7, 11, 13, 17),)


@dataclass(frozen=True)
class SplitModel:
    """``head(trunk(ids))`` is the model; ids (rows, tokens), hidden states (rows, tokens, width)."""

    trunk: Callable[[mx.array], mx.array]
    head: Head
    head_is_frozen: bool
    vocabulary: int


def split(module: Any) -> SplitModel | None:
    """The two parts, or None when the model does more than apply one after the other.

    Models of mlx-lm name them ``model`` and ``lm_head``, or apply the embedding once more. Some also scale or cap the
    logits; that is found by comparing on a few tokens, never by name.
    """
    trunk = getattr(module, "model", None)
    if not callable(trunk):
        return None
    head = getattr(module, "lm_head", None) or getattr(getattr(trunk, "embed_tokens", None), "as_linear", None)
    if head is None:
        return None
    was_training, ids = module.training, mx.array(PROBE_IDS)
    module.eval()  # dropout would make the two differ, and use up random numbers
    try:
        parts, whole = head(trunk(ids)), module(ids)
    except (TypeError, ValueError, AttributeError):
        return None
    finally:
        module.train(was_training)
    if parts.shape != whole.shape or not mx.array_equal(parts, whole).item():
        return None
    owner = module.lm_head if head is getattr(module, "lm_head", None) else trunk.embed_tokens
    return SplitModel(trunk, head, not tree_flatten(owner.trainable_parameters()), whole.shape[-1])

"""Asks a model of mlx-lm what it does with a few tokens, by the names that its parts usually have.

A refusal is an answer: the model then keeps its own way.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

Answer = TypeVar("Answer")

FOREIGN = (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError)  # that a model's code raises
TOLERANCE, TOLERANCE_16_BIT = 1e-2, 5e-2  # largest difference that is rounding, relative to the largest number
FEW_WORDS, BY_WORD = 256, ("weight", "scales", "biases", "bias")
SETTING, NUMBER = (bool, int, float, str, type(None)), ("layer_idx", "idx", "layer_id", "layer_number")


class Refusal(NotImplementedError):
    """Why a model does not take what it was given."""


@contextmanager
def refusals() -> Iterator[None]:
    """Around calls into a model and nothing else: what it raises becomes a Refusal, in the first line of its words."""
    try:
        yield
    except Refusal:
        raise
    except FOREIGN as error:
        raise Refusal(f"{type(error).__name__}: {error}".partition("\n")[0]) from error


def asked(call: Callable[..., Any], *arguments: Any) -> mx.array:
    """What the model gives, computed; raises Refusal."""
    with refusals():
        values = call(*arguments)
        mx.eval(values)
    if not isinstance(values, mx.array):
        raise Refusal(f"it gives no array, but {type(values).__name__}")
    return values


def are_close(found: Sequence[mx.array], expected: Sequence[mx.array], largest: float, share: float) -> bool:
    """Whether these are the same numbers, up to a share of the largest one; what is not a number is not."""
    with np.errstate(invalid="ignore"):
        return all(
            one.shape == other.shape and np.abs(numbers(one) - numbers(other)).max() <= share * largest
            for one, other in zip(found, expected, strict=True)
        )


def numbers(values: mx.array) -> np.ndarray:
    """As float32."""
    return np.array(values.astype(mx.float32))


def tolerance_of(dtype: Any) -> float:
    """The share of the largest number that is rounding."""
    return TOLERANCE if dtype == mx.float32 else TOLERANCE_16_BIT


def through_few_blocks(module: Any, ask: Callable[[], Answer]) -> Answer:
    """What ``ask`` says of the model in evaluation; raises Refusal.

    Through few of its blocks, one of each kind at least, if it lets us: a large model takes long.
    """
    was_training = module.training
    module.eval()  # dropout would make numbers differ, and use up random ones
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


@contextmanager
def few_blocks(module: Any) -> Iterator[bool]:
    """Inside, the model has only the first of its blocks, up to where each kind has been seen; whether it has fewer.

    Models that keep their blocks elsewhere keep them all.
    """
    trunk: Any = getattr(module, "model", None)
    blocks = trunk.get("layers") if isinstance(trunk, dict) else None  # mlx's modules are dicts; properties are not in
    if not isinstance(blocks, list) or [id(block) for block in blocks] != [id(block) for block in module.layers]:
        yield False
        return
    kinds = [_kind(block) for block in blocks]
    count = max(kinds.index(kind) for kind in kinds) + 1
    trunk.layers = blocks[:count]
    try:
        yield count < len(blocks)
    finally:
        trunk.layers = blocks


def _kind(block: Any) -> list[tuple[str, str, str]]:
    """What a block is made of, and its settings except its number."""
    return sorted(
        (name, type(part).__name__, str(sorted(
            (key, value) for key, value in vars(part).items() if isinstance(value, SETTING) and key not in NUMBER
        )))
        for name, part in block.named_modules()
    )  # fmt: skip


@contextmanager
def few_words(module: Any, layers: Iterable[Any]) -> Iterator[None]:
    """Inside, these layers, embedding and head, have FEW_WORDS rows: a large vocabulary takes more than a training.

    Where their rows are not the vocabulary of the model's arguments, they keep all.
    """
    words = getattr(getattr(module, "args", None), "vocab_size", 0)
    weights = [(part, {name: part[name] for name in BY_WORD if name in part}) for part in layers if part is not None]
    if all("weight" in arrays and arrays["weight"].shape[0] == words for _, arrays in weights):
        for part, arrays in weights:
            part.update({name: array[:FEW_WORDS] for name, array in arrays.items()})
    try:
        yield
    finally:
        for part, arrays in weights:
            part.update(arrays)


def trunk_of(module: Any) -> Any:
    """The part that makes hidden states of ids; None if it cannot be separated."""
    trunk = getattr(module, "model", None)
    return trunk if callable(trunk) else None


def head_size(module: Any) -> int:
    """Numbers of an attention head; 0 where they are not known, or not the same for all queries, keys and values."""
    arguments = getattr(module, "args", None)
    sizes = {getattr(arguments, name) for name in dir(arguments) if name.endswith("head_dim")} - {None, 0}
    if sizes:
        return sizes.pop() if len(sizes) == 1 else 0
    heads = getattr(arguments, "num_attention_heads", 0)
    return getattr(arguments, "hidden_size", 0) // heads if heads else 0

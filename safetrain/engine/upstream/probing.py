"""Tests a model of mlx-lm on a few tokens, using the names that its parts usually have.

A refusal is no error: what the model does not support is then not used.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

Answer = TypeVar("Answer")

FOREIGN = (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError)  # that a model's code raises
TOLERANCE, TOLERANCE_16_BIT = 1e-2, 5e-2  # largest rounding difference, relative to the largest number
FEW_WORDS, BY_WORD = 256, ("weight", "scales", "biases", "bias")
SETTING, NUMBER = (bool, int, float, str, type(None)), ("layer_idx", "idx", "layer_id", "layer_number")


class Refusal(NotImplementedError):
    """Why a model cannot compute with the given input."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an error of a model's code into a Refusal with its first line. Wrap only calls into the model."""
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


def are_close(found: Sequence[mx.array], expected: Sequence[mx.array], largest: float, share: float) -> bool:
    """Whether these are the same numbers, up to a share of the largest one; NaN never is."""
    with np.errstate(invalid="ignore"):
        return all(
            one.shape == other.shape and np.abs(numbers(one) - numbers(other)).max() <= share * largest
            for one, other in zip(found, expected, strict=True)
        )


def numbers(values: mx.array) -> np.ndarray:
    """Copy to numpy, in float32."""
    return np.array(values.astype(mx.float32))


def tolerance_of(dtype: Any) -> float:
    """Largest rounding difference in this type, as a share of the largest number."""
    return TOLERANCE if dtype == mx.float32 else TOLERANCE_16_BIT


def through_few_blocks(module: Any, ask: Callable[[], Answer]) -> Answer:
    """Call ``ask`` with the model in evaluation mode; raises Refusal.

    It first tries only some blocks, at least one of each kind, because a large model takes long.
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
    """Reduce the model to its first blocks that include every kind, inside this context; yields whether it has fewer.

    Models that store their blocks elsewhere keep them all.
    """
    trunk: Any = getattr(module, "model", None)
    blocks = trunk.get("layers") if isinstance(trunk, dict) else None  # mlx's modules are dicts, without properties
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
    """The parts of a block, and their settings except the block's number."""
    return sorted(
        (name, type(part).__name__, str(sorted(
            (key, value) for key, value in vars(part).items() if isinstance(value, SETTING) and key not in NUMBER
        )))
        for name, part in block.named_modules()
    )  # fmt: skip


@contextmanager
def few_words(module: Any, layers: Iterable[Any]) -> Iterator[None]:
    """Reduce these layers (embedding, head) to FEW_WORDS rows, inside this context: a vocabulary takes much memory.

    They keep all rows if these are not the vocabulary in the model's arguments.
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
    """The part that turns ids into hidden states; None if it cannot be separated."""
    trunk = getattr(module, "model", None)
    return trunk if callable(trunk) else None


def head_size(module: Any) -> int:
    """Width of an attention head; 0 if it is unknown, or differs between queries, keys and values."""
    arguments = getattr(module, "args", None)
    sizes = {getattr(arguments, name) for name in dir(arguments) if name.endswith("head_dim")} - {None, 0}
    if sizes:
        return sizes.pop() if len(sizes) == 1 else 0
    heads = getattr(arguments, "num_attention_heads", 0)
    return getattr(arguments, "hidden_size", 0) // heads if heads else 0

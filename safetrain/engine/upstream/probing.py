"""Asks a model of mlx-lm what it does with a few tokens, by the names that its parts usually have.

A refusal is an answer: the model then keeps its own way.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx

Answer = TypeVar("Answer")

FOREIGN = (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError)  # that a model's code raises
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


def _kind(block: Any) -> tuple[tuple[str, str, str], ...]:
    """What a block is made of, and its settings except its number."""
    parts = []
    for name, part in block.named_modules():
        settings = {key: value for key, value in vars(part).items() if isinstance(value, SETTING) and key not in NUMBER}
        parts.append((name, type(part).__name__, str(sorted(settings.items(), key=str))))
    return tuple(sorted(parts))


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

"""Asks a model what it does with a few tokens. What it refuses is an answer; an error of this project is none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx

from safetrain.engine.upstream.parts import few_blocks

Answer = TypeVar("Answer")

FOREIGN = (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError)  # that a model's code raises


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

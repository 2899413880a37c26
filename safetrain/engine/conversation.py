"""Answers a token at a time, in a chat that goes on."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import require_base
from safetrain.engine.model import BaseModel, dequantize_to_answer, open_base
from safetrain.engine.upstream.generation import PromptCache, chooser
from safetrain.engine.upstream.loading import errors_told
from safetrain.engine.weight_files import apply_adapter, require_effect

STOP, LENGTH, CONTEXT, STOPPED = "stop", "length", "context", "stopped"  # how an answer ends


@dataclass(frozen=True)
class Sampling:
    """How answers are made: the likeliest token at temperature 0."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None  # of the first answer; the next go on from there


class Conversation:
    """One chat with one model. ``ended`` says how the last answer did: stop, length, context or stopped."""

    def __init__(self, model: BaseModel, stop_ids: frozenset[int], context: int | None, sampling: Sampling) -> None:
        """``context``: tokens that the model takes, None where it does not say."""
        model.module.eval()
        self._ends, self._context = stop_ids | model.eos_ids, context
        self._kept, self._most = PromptCache(model.module), sampling.max_new_tokens
        self._choose = chooser(sampling.temperature, sampling.top_p, sampling.seed)
        self.ended, self.kept_tokens = STOP, 0  # tokens of the last prompt that had been read before

    def answer(self, prompt: Sequence[int], stopped: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """Tokens of the answer to ``prompt``, without the one that ends it; ``stopped`` is called before each."""
        most = self._most if self._context is None else min(self._most, self._context - len(prompt))
        self.ended = LENGTH if most == self._most else CONTEXT
        if most <= 0:
            return
        with errors_told("answer"):
            self.kept_tokens = self._kept.read(prompt, stopped)
            if stopped():
                self.ended = STOPPED
                return
            token = self._next(mx.array([prompt[-1]]))
        self._kept.ids.append(prompt[-1])
        for remaining in reversed(range(most)):
            following = self._next(token) if remaining else None  # computed while this one is shown
            number = int(np.array(token)[0])
            if following is not None:
                self._kept.ids.append(number)
            if number in self._ends:
                self.ended = STOP
                return
            yield number
            if following is None:
                return
            if stopped():
                self.ended = STOPPED
                return
            token = following

    def _next(self, token: mx.array) -> mx.array:
        following = self._choose(self._kept.next_logits(token))
        mx.async_eval(following)
        return following


def open_tuned(base: Path, adapter: Path | None) -> BaseModel:
    """The base with the adapter on it, or by itself, ready to answer; raises ModelError."""
    files = _fitting(base, adapter)
    model = open_base(base, dequantize=dequantize_to_answer(files))
    if adapter is not None:
        apply_adapter(model, adapter)
    return model


def open_both(base: Path, adapter: Path) -> tuple[BaseModel, BaseModel]:
    """The base, and the tuned model; the weights that they share are in memory once. Raises ModelError."""
    files = _fitting(base, adapter)
    model = open_base(base, dequantize=dequantize_to_answer(files))
    shared: dict[int, Any] = {id(value): value for _, value in tree_flatten(model.module.parameters())}
    tuned = copy.deepcopy(model, shared)
    apply_adapter(tuned, adapter)
    return model, tuned


def _fitting(base: Path, adapter: Path | None) -> ModelFiles:
    files = read_model_files(base)
    if adapter is not None:
        require_base(adapter, base, files.fingerprint)
        require_effect(adapter)
    return files

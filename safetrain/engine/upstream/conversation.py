"""Answers in a chat, one token at a time."""

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from safetrain.core.model.files import read_model_files
from safetrain.engine.model import BaseModel, dequantize_to_answer, open_base
from safetrain.engine.upstream.loading import errors_told
from safetrain.engine.weight_files import apply_adapter

STOP, LENGTH, CONTEXT, STOPPED = "stop", "length", "context", "stopped"  # how an answer ends
PREFILL_TOKENS = 512  # of a prompt that are read at a time


class Conversation:
    """A chat with one model. It keeps its cache, and reads the next prompt from the first token that differs.

    ``ended`` says how the last answer ended: stop, length, context or stopped.
    """

    def __init__(
        self,
        model: BaseModel,
        stop_ids: frozenset[int],
        context: int | None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> None:
        """``context``: the model's context length in tokens, None if unknown. Temperature 0 is greedy."""
        model.module.eval()
        self._module, self._ends, self._context = model.module, stop_ids | model.eos_ids, context
        self._most, self._choose = max_new_tokens, make_sampler(temperature, top_p=top_p)
        if seed is not None:
            mx.random.seed(seed)
        self.ended, self.kept_tokens = STOP, 0  # tokens of the last prompt that had been read before
        self._ids, self._caches = list[int](), list[Any]()  # that the caches hold

    def answer(self, prompt: Sequence[int], stopped: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """Yield the answer's tokens without its stop token; ``stopped`` is called after each."""
        most = self._most if self._context is None else min(self._most, self._context - len(prompt))
        self.ended = LENGTH if most == self._most else CONTEXT
        if most <= 0:
            return
        self.kept_tokens = same = self._keep(prompt)
        self._ids[same:] = prompt[same:]
        with errors_told("answer"):
            for token, _ in generate_step(
                mx.array(list(prompt[same:])), self._module, max_tokens=most, sampler=self._choose,
                prompt_cache=self._caches, prefill_step_size=PREFILL_TOKENS,
            ):  # fmt: skip
                self._ids.append(token)
                if token in self._ends:
                    self.ended = STOP
                    return
                yield token
                if stopped():
                    self.ended = STOPPED
                    return

    def _keep(self, prompt: Sequence[int]) -> int:
        """Cut the cache to the prefix that ``prompt`` shares, without its last token; returns its length."""
        most = min(len(self._ids), len(prompt) - 1)
        same = next((place for place in range(most) if self._ids[place] != prompt[place]), most)
        surplus = len(self._ids) - same
        if not self._caches or (
            surplus and not (can_trim_prompt_cache(self._caches) and trim_prompt_cache(self._caches, surplus))
        ):
            self._caches, same = make_prompt_cache(self._module), 0
        del self._ids[same:]
        return same


def open_tuned(base: Path, adapter: Path | None) -> BaseModel:
    """Open the base, with or without an adapter, ready to answer; raises ModelError."""
    model = open_base(base, dequantize=dequantize_to_answer(read_model_files(base)))
    if adapter is not None:
        apply_adapter(model, adapter)
    return model


def open_both(base: Path, adapter: Path) -> tuple[BaseModel, BaseModel]:
    """Open the base and the tuned model; memory holds their shared weights once. Raises ModelError."""
    model = open_tuned(base, None)
    shared: dict[int, Any] = {id(value): value for _, value in tree_flatten(model.module.parameters())}
    tuned = copy.deepcopy(model, shared)
    apply_adapter(tuned, adapter)
    return model, tuned

"""Generates answers with an mlx-lm model: in a chat, to prompts one by one, or to several prompts together.

Prompts are answered together only if that gives the same answers as one by one. A comparison on a few tokens decides,
not the model's name.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step, generation_stream
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from safetrain.engine.upstream.adaptation import Refusal, are_close, asked, refusal_of, refusals
from safetrain.engine.upstream.loading import errors_told

if TYPE_CHECKING:
    from safetrain.engine.model import BaseModel

PREFILL_TOKENS = 1024  # of prompts, read at a time; limits the memory of activations
# Rows of different lengths: the first is read in several parts, and the others leave the batch before it.
PROBE_ROWS = (tuple(range(2, 76)), (1, 2, 3, 5, 7, 11, 13, 17, 19, 23), (2, 3, 5, 7, 9, 4, 6, 8))
PROBED_ROWS = 32  # of the tested batch: large, so that few tokens of each row are read at a time
ROUNDING = 1e-4  # relative to the largest number: only the order of sums differs


class Conversation:
    """A chat with one model. It keeps its cache, and reads a prompt only from the first token that is new.

    ``ended`` says how the last answer ended: stop (token), length, context or stopped (by the caller).
    """

    def __init__(
        self,
        model: "BaseModel",
        stop_ids: frozenset[int],
        context: int | None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> None:
        """``context``: the model's context length in tokens, None if unknown. Temperature 0 is greedy."""
        model.module.eval()
        self._model, self._module, self._ends, self._context = model, model.module, stop_ids | model.eos_ids, context
        self._most, self._choose = max_new_tokens, make_sampler(temperature)
        if seed is not None:
            mx.random.seed(seed)
        self.ended, self.kept_tokens = "stop", 0  # tokens of the last prompt that the cache held already
        self._ids, self._caches = list[int](), list[Any]()  # the tokens in the caches, and the caches

    def answer(self, prompt: Sequence[int], stopped: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """Yield the answer's tokens without its stop token; True from ``stopped``, called after each token, ends it."""
        most = self._most if self._context is None else min(self._most, self._context - len(prompt))
        self.ended = "length" if most == self._most else "context"
        if most <= 0:
            return
        self.kept_tokens = same = self._keep(prompt)
        self._ids[same:] = prompt[same:]
        with errors_told("answer"), self._model.answering(1):
            for token, _ in generate_step(
                mx.array(list(prompt[same:])), self._module, max_tokens=most, sampler=self._choose,
                prompt_cache=self._caches, prefill_step_size=PREFILL_TOKENS,
            ):  # fmt: skip
                self._ids.append(token)
                if token in self._ends:
                    self.ended = "stop"
                    return
                yield token
                if stopped():
                    self.ended = "stopped"
                    return

    def _keep(self, prompt: Sequence[int]) -> int:
        """Cut the cache to the prefix shared with ``prompt``, less the prompt's last token; returns the new length."""
        most = min(len(self._ids), len(prompt) - 1)
        same = next((place for place in range(most) if self._ids[place] != prompt[place]), most)
        surplus = len(self._ids) - same
        can_cut = bool(self._caches) and can_trim_prompt_cache(self._caches)
        if not self._caches or (surplus and not (can_cut and trim_prompt_cache(self._caches, surplus))):
            self._caches, same = make_prompt_cache(self._module), 0
        del self._ids[same:]
        return same


def continuation_logprobs(module: Any, prompt: Sequence[int], options: Sequence[Sequence[int]]) -> np.ndarray:
    """(options,) float64 log-probability, in nats, of each continuation of a prompt, which is read once."""
    found, (caches, first) = np.zeros(len(options)), _read(module, prompt)
    can_trim = can_trim_prompt_cache(caches)
    for number, (begin, *rest) in enumerate(options):
        found[number] = first[0, begin]
        if rest:
            own = caches if can_trim else copy.deepcopy(caches)
            more = _log_softmax(module(mx.array([[begin, *rest[:-1]]]), cache=own)[0])
            found[number] += more[np.arange(len(rest)), rest].sum()
            if own is caches and trim_prompt_cache(caches, len(rest)) < len(rest):  # a sliding window has moved on
                caches, _ = _read(module, prompt)
    return found


def _read(module: Any, prompt: Sequence[int]) -> tuple[list[Any], np.ndarray]:
    """The caches after a prompt, and (1, vocabulary) log-probabilities of the next token."""
    caches, before = make_prompt_cache(module), prompt[:-1]
    for start in range(0, len(before), PREFILL_TOKENS):  # their logits are never computed
        module(mx.array([before[start : start + PREFILL_TOKENS]]), cache=caches)
        mx.eval([each.state for each in caches])
    return caches, _log_softmax(module(mx.array([prompt[-1:]]), cache=caches)[0])


def _log_softmax(logits: mx.array) -> np.ndarray:
    values = np.array(logits.astype(mx.float32)).astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


def wait_for_the_next_token() -> None:
    """mlx-lm computes it ahead, also after an answer's last one."""
    mx.synchronize(generation_stream)


def one_by_one(
    module: Any, prompts: Sequence[Sequence[int]], ends: frozenset[int], most: int
) -> Iterator[tuple[int, int, bool]]:
    """Answer one prompt after the other; yield the prompt's number, an answer token, and whether it is the last."""
    for number, prompt in enumerate(prompts):
        tokens = generate_step(mx.array(list(prompt)), module, max_tokens=most, prefill_step_size=PREFILL_TOKENS)
        for count, (token, _) in enumerate(tokens, 1):
            ended = token in ends or count == most
            yield number, token, ended
            if ended:
                break


def together(
    module: Any, prompts: Sequence[Sequence[int]], ends: frozenset[int], most: int, rows: int
) -> Iterator[tuple[int, int, bool]]:
    """Yield the same as ``one_by_one`` in another order: at most ``rows`` prompts run at a time, the longest first."""
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    generator = _batches(module, rows, max_tokens=most, stop_tokens=[[token] for token in ends])
    generator.insert([list(prompts[number]) for number in order])
    while found := generator.next_generated():
        for each in found:
            yield order[each.uid], each.token, each.finish_reason is not None


def _batches(module: Any, rows: int, **settings: Any) -> Any:
    step = PREFILL_TOKENS // rows  # tokens of each prompt; reading fewer rows at a time would be slower
    return BatchGenerator(
        module, completion_batch_size=rows, prefill_batch_size=rows, prefill_step_size=step, **settings
    )


def padding_refusal(module: Any) -> str:
    """Why prompts of different lengths do not give the same answers together as alone; empty if they do."""

    def ask() -> None:
        """Compare the probabilities of each answer's first one to three tokens, from prompts run together and alone."""
        rows, found = [list(row) for row in PROBE_ROWS], [list[mx.array]() for _ in PROBE_ROWS]
        with refusals():
            generator = _batches(module, PROBED_ROWS)
            generator.insert([list(row) for row in rows], [3, 1, 2])
            while responses := generator.next_generated():
                for each in responses:
                    found[each.uid].append(each.logprobs)
                    rows[each.uid].append(each.token)
            mx.eval(found)
        alone = [asked(module, mx.array([row[:-1]]))[0, -len(own) :] for row, own in zip(rows, found, strict=True)]
        expected = [logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in alone]
        if not are_close([mx.stack(own) for own in found], expected, ROUNDING):
            raise Refusal("padding the prompts changes the results")

    return refusal_of(module, ask)

"""Reads prompts with an mlx-lm model into the caches that generate their answers.

Prompts of different lengths run together in mlx-lm's batch caches. Prompts of similar length are read together, padded
on the right, which causal attention never sees, then moved to the right end of the cache and joined with the others.
A comparison on a few tokens, not the model's name, decides whether padded prompts give the same numbers as single
ones.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from safetrain.engine.upstream.probing import (
    TOLERANCE_16_BIT,
    Refusal,
    are_close,
    asked,
    numbers,
    refusals,
    through_few_blocks,
)

# A cache grows by CACHE_STEP positions: short answers need far fewer than mlx-lm's 256. PREFILL_TOKENS of all prompts
# together are read at a time (up to twice as many for more than 16 prompts), which limits the memory of activations;
# mlx-lm's caches need a multiple of CACHE_STEP.
CACHE_STEP, PREFILL_TOKENS = 32, 512
# The last is padded after its tokens; the first is so much longer that it is read separately.
PROBE_ROWS = (tuple(range(2, CACHE_STEP + 12)), (1, 2, 3, 5, 7, 11, 13, 17, 19, 23), (2, 3, 5, 7, 9, 4, 6, 8))
PAD_ID, ROUNDING = 0, 1e-4  # ROUNDING is relative to the largest logit: only the order of sums differs


class Continuations:
    """Prompts that a model of mlx-lm has read, ready to be continued a token at a time.

    ``padded``: prompts may have any lengths, and rows can be removed. Without it, all have one length and stay.
    """

    def __init__(self, module: Any, prompts: Sequence[Sequence[int]], *, padded: bool) -> None:
        """Read all but the last token of each prompt; the first call of ``next_logits`` takes these."""
        self._module, self.rows_may_leave = module, padded
        beginnings = [prompt[:-1] for prompt in prompts]
        alike = [list(group) for _, group in groupby(beginnings, _like_length)] if padded else [beginnings]
        self._caches, *others = [self._read(group) for group in alike]
        for caches in others:
            for cache, other in zip(self._caches, caches, strict=True):
                cache.extend(other)

    def next_logits(self, tokens: mx.array) -> mx.array:
        """Logits (rows, vocabulary) after one more token of each row, (rows,)."""
        return self._module(tokens[:, None], cache=self._caches)[:, -1, :]

    def keep(self, rows: Sequence[int], tokens: mx.array) -> mx.array:
        """Continue only these rows; returns their ``tokens``. Only for ``padded`` prompts."""
        places = mx.array(list(rows))
        for cache in self._caches:
            cache.filter(places)
        return tokens[places]

    def _read(self, prompts: Sequence[Sequence[int]]) -> list[Any]:
        """Read these prompts, of similar lengths, and return their caches.

        A long prompt's logits with a large vocabulary exceed a training's memory; mlx never computes them, because
        nothing uses them.
        """
        caches: list[Any] = make_prompt_cache(self._module)
        if self.rows_may_leave:
            caches = [cache.merge([cache] * len(prompts)) for cache in caches]
        for cache in caches:
            if hasattr(cache, "step"):
                cache.step = CACHE_STEP
        lengths = [len(prompt) for prompt in prompts]
        width, step = max(lengths), max(1, PREFILL_TOKENS // len(prompts) // CACHE_STEP) * CACHE_STEP
        if min(lengths) < width and width % step == 1:  # caches with windows take one token for an answer's
            width += 1
        padding = [width - length for length in lengths]
        tokens = np.full((len(prompts), width), PAD_ID, dtype=np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        if any(padding):
            for cache in caches:
                cache.prepare(lengths=lengths, right_padding=padding)
        for start in range(0, width, step):
            self._module(mx.array(tokens[:, start : start + step]), cache=caches)
            mx.eval([cache.state for cache in caches])
        if any(padding):
            for cache in caches:
                cache.finalize()
            mx.eval([cache.state for cache in caches])
        return caches


def _like_length(prompt: Sequence[int]) -> int:
    """Number of a prompt's group. Prompts of a group are read together, with few tokens of padding."""
    return -(-len(prompt) // CACHE_STEP)


def padding_refusal(module: Any) -> str:
    """Why padded prompts do not give the same answers as single ones; empty if they do."""

    def ask() -> str:
        """Compare prompts of several lengths, continued by two tokens, and then with only one row left."""
        alone = [asked(module, mx.array([row]))[0] for row in PROBE_ROWS]
        with refusals():
            together = Continuations(module, [row[:-2] for row in PROBE_ROWS], padded=True)
            logits = [together.next_logits(mx.array([row[place] for row in PROBE_ROWS])) for place in (-3, -2)]
            last = together.keep([len(PROBE_ROWS) - 1], mx.array([row[-1] for row in PROBE_ROWS]))
            logits.append(together.next_logits(last))
            mx.eval(logits)
        expected = [mx.stack([values[place] for values in alone]) for place in (-3, -2)] + [alone[-1][-1:]]
        largest = max(float(np.abs(numbers(values)).max()) for values in alone)
        rounding = ROUNDING if logits[0].dtype == mx.float32 else TOLERANCE_16_BIT
        return "" if are_close(logits, expected, largest, rounding) else "padded prompts give other numbers"

    try:
        return through_few_blocks(module, ask)
    except Refusal as refusal:
        return str(refusal)

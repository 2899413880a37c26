"""Greedy answers of an mlx-lm model, to many prompts together where that gives the answers of single prompts.

A comparison on a few tokens, not the model's name, decides where it does.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step

from safetrain.engine.upstream.adaptation import (
    TOLERANCE_16_BIT,
    Refusal,
    are_close,
    asked,
    numbers,
    refusals,
    through_few_blocks,
)

PREFILL_TOKENS = 1024  # of all prompts that are read together, which limits the memory of activations
# Of different lengths: the first is read in several parts, and the others leave the batch before it.
PROBE_ROWS = (tuple(range(2, 76)), (1, 2, 3, 5, 7, 11, 13, 17, 19, 23), (2, 3, 5, 7, 9, 4, 6, 8))
PROBED_ROWS = 32  # so few tokens of each are read together that the first needs several parts
ROUNDING = 1e-4  # relative to the largest logit: only the order of sums differs


def one_by_one(
    module: Any, prompts: Sequence[Sequence[int]], ends: frozenset[int], most: int
) -> Iterator[tuple[int, int, bool]]:
    """Yield each prompt's number, the next token of its answer, and whether the answer ends with it."""
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
    step = PREFILL_TOKENS // rows  # of each prompt; fewer rows than are answered together would be read slower
    return BatchGenerator(
        module, completion_batch_size=rows, prefill_batch_size=rows, prefill_step_size=step, **settings
    )


def padding_refusal(module: Any) -> str:
    """Why prompts of different lengths do not give the same answers together as alone; empty if they do."""

    def ask() -> str:
        """Compare the probabilities of each prompt's first tokens: one, two or three."""
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
        largest = max(float(np.abs(numbers(logits)).max()) for logits in alone)
        expected = [logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in alone]
        rounding = ROUNDING if alone[0].dtype == mx.float32 else TOLERANCE_16_BIT
        same = are_close([mx.stack(own) for own in found], expected, largest, rounding)
        return "" if same else "padded prompts give other numbers"

    try:
        return through_few_blocks(module, ask)
    except Refusal as refusal:
        return str(refusal)

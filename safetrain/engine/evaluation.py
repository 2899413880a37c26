"""Measures a model on rows: loss per label and greedy answers. Nothing is random, nothing is trained."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.engine.batches import MicroBatch, in_order, layout_for
from safetrain.engine.block_loop import computed
from safetrain.engine.cpu.kernels import side_by_side
from safetrain.engine.loss import ShardLoss
from safetrain.engine.model import BaseModel
from safetrain.engine.upstream.generation import continuation_logprobs, one_by_one, together

MOST_ROWS = 32  # per batch: with more rows, each step takes longer in proportion
CACHE_STEP = 256  # positions by which mlx-lm's caches grow


def row_losses(
    model: BaseModel, data: TokenRows, max_tokens: int, beat: Callable[[MicroBatch], None] = lambda _batch: None
) -> np.ndarray:
    """(rows,) loss in nats, summed over each row's labels. Computes at most ``max_tokens`` tokens at a time.

    Leaves the model in evaluation mode. ``beat`` is called with each micro-batch before it is computed.
    """
    model.module.eval()
    loss, sums = ShardLoss(model), np.zeros(len(data))
    for batch in computed(model, in_order(data, layout_for(model, max_tokens))):
        beat(batch)
        with loss.one_head():
            label_losses = side_by_side(loss.by_label, batch.shards)
        for shard, losses in zip(batch.shards, label_losses, strict=True):
            np.add.at(sums, shard.label_rows, np.array(losses.astype(mx.float32)))
    return sums


def option_logprobs(
    model: BaseModel,
    prompts: Sequence[Sequence[int]],
    options: Sequence[Sequence[Sequence[int]]],
    beat: Callable[[float], None] = lambda _done: None,
) -> list[np.ndarray]:
    """Log-probabilities of each prompt's options as its continuation, (options,) in nats. Prompts run one by one."""
    model.module.eval()
    found = list[np.ndarray]()
    with model.answering(1):
        for prompt, own in zip(prompts, options, strict=True):
            found.append(continuation_logprobs(model.module, prompt, own))
            beat(len(found))
    return found


def answer(
    model: BaseModel,
    prompts: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    max_new_tokens: int,
    max_tokens: int,
    beat: Callable[[float], None] = lambda _done: None,
) -> list[list[int]]:
    """Greedy answers without their stop token, which is the model's own or one of ``stop_ids``.

    As many prompts run together as ``max_tokens`` prompt and answer tokens allow. The answers are the same as for
    single prompts, unless two tokens are equally likely up to rounding. After each token ``beat`` gets the number of
    finished answers, with unfinished answers as fractions.
    """
    model.module.eval()
    ends, answers = stop_ids | model.eos_ids, [list[int]() for _ in prompts]
    longest = max(map(len, prompts), default=0) + max_new_tokens
    rows = min(len(prompts), MOST_ROWS, max_tokens // (-(-longest // CACHE_STEP) * CACHE_STEP))
    rows = rows if rows > 1 and model.continues_padded else 1
    asked = model.module, prompts, ends, max_new_tokens
    tokens = together(*asked, rows) if rows > 1 else one_by_one(*asked)
    shares = [0.0] * len(prompts)
    with model.answering(rows):
        for number, token, ended in tokens:
            if token not in ends:
                answers[number].append(token)
            shares[number] = 1.0 if ended else len(answers[number]) / max_new_tokens
            beat(sum(shares))
    return answers

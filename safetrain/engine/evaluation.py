"""Measures a model on rows: loss per trained token, and greedy answers. Nothing random, nothing trained."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.engine.backend import device, side_by_side
from safetrain.engine.batches import MicroBatch, in_order
from safetrain.engine.layout import layout_for
from safetrain.engine.loss import ShardLoss
from safetrain.engine.model import BaseModel
from safetrain.engine.upstream.generation import read_prompts


def measure_loss(
    model: BaseModel,
    data: TokenRows,
    max_tokens: int,
    beat: Callable[[MicroBatch, int], None] = lambda _batch, _number: None,
) -> float:
    """Mean loss in nats per label of ``data``, each row seen once, at most ``max_tokens`` tokens at a time.

    Leaves the model in evaluation mode. ``beat`` is told of each micro-batch before it is computed.
    """
    model.module.eval()
    loss, total = ShardLoss(model, training=False), 0.0
    layout = layout_for(model, max_tokens)
    for number, batch in enumerate(in_order(data, layout)):
        beat(batch, number)
        if device().side_by_side:
            with loss.one_head():
                losses = side_by_side(lambda _, shard: loss(shard), batch.shards)
        else:
            losses = [loss(shard) for shard in batch.shards]
        total += sum(float(np.array(shard)) for shard in losses)
    return total / int(data.label_counts.sum(dtype=np.int64))


def answer(
    model: BaseModel,
    prompts: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    max_new_tokens: int,
    max_tokens: int,
) -> list[list[int]]:
    """Greedy continuations without their closing token: the model's own, or one of ``stop_ids``.

    Prompts of one length run together, at most ``max_tokens`` tokens at a time, so none is padded.
    """
    model.module.eval()
    ends = stop_ids | model.eos_ids
    by_length = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    answers: list[list[int]] = [[] for _ in prompts]
    for length in sorted(by_length):
        group, size = by_length[length], max(1, max_tokens // (length + max_new_tokens))
        for start in range(0, len(group), size):
            chosen = group[start : start + size]
            found = _greedy(model, mx.array([list(prompts[index]) for index in chosen]), ends, max_new_tokens)
            for index, ids in zip(chosen, found, strict=True):
                answers[index] = ids
    return answers


def _greedy(model: BaseModel, prompts: mx.array, stop_ids: frozenset[int], max_new_tokens: int) -> list[list[int]]:
    """Continue each row of ``prompts`` (rows, tokens) until it ends or ``max_new_tokens`` are made."""
    cache = read_prompts(model.module, prompts[:, :-1])
    answers: list[list[int]] = [[] for _ in range(prompts.shape[0])]
    open_rows = set(range(len(answers)))
    tokens = prompts[:, -1:]
    for _ in range(max_new_tokens):
        chosen = mx.argmax(model.module(tokens, cache=cache)[:, -1, :], axis=-1)  # (rows,)
        tokens = chosen[:, None]
        for row, token in enumerate(np.array(chosen).tolist()):
            if row in open_rows and token in stop_ids:
                open_rows.discard(row)
            elif row in open_rows:
                answers[row].append(token)
        if not open_rows:
            break
    return answers

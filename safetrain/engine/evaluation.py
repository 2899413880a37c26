"""Measures a model on rows: loss per label and greedy answers. Nothing is random, nothing is trained."""

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.errors import DataError
from safetrain.engine.backend import device
from safetrain.engine.batches import MicroBatch, in_order, layout_for
from safetrain.engine.cpu.kernels import side_by_side
from safetrain.engine.loss import ShardLoss
from safetrain.engine.model import BaseModel
from safetrain.engine.upstream.generation import Continuations

MOST_ROWS = 32  # per batch: beyond that, time per token grows in proportion


def measure_loss(
    model: BaseModel,
    data: TokenRows,
    max_tokens: int,
    beat: Callable[[MicroBatch, int], None] = lambda _batch, _number: None,
) -> float:
    """Mean loss in nats per label of ``data``; see ``row_losses``. Raises DataError if ``data`` has no labels."""
    labels = int(data.label_counts.sum(dtype=np.int64))
    if not labels:
        raise nothing_to_measure()
    return float(row_losses(model, data, max_tokens, beat).sum() / labels)


def nothing_to_measure() -> DataError:
    """The error for rows without labels."""
    return DataError("No token of the validation rows is a label.", do="give data/valid rows with answers")


def row_losses(
    model: BaseModel,
    data: TokenRows,
    max_tokens: int,
    beat: Callable[[MicroBatch, int], None] = lambda _batch, _number: None,
) -> np.ndarray:
    """(rows,) loss in nats, summed over each row's labels. Computes at most ``max_tokens`` tokens at a time.

    Leaves the model in evaluation mode. ``beat`` is called with each micro-batch before it is computed.
    """
    model.module.eval()
    loss, sums = ShardLoss(model, training=False), np.zeros(len(data))
    layout = layout_for(model, max_tokens)
    for number, batch in enumerate(in_order(data, layout)):
        beat(batch, number)
        if device().side_by_side:
            with loss.one_head():
                label_losses = side_by_side(lambda shard: loss.by_label(shard), batch.shards)
        else:
            label_losses = [loss.by_label(shard) for shard in batch.shards]
        for shard, losses in zip(batch.shards, label_losses, strict=True):
            np.add.at(sums, shard.label_rows, np.array(losses.astype(mx.float32)))
    return sums


def answer(
    model: BaseModel,
    prompts: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    max_new_tokens: int,
    max_tokens: int,
    beat: Callable[[float], None] = lambda _done: None,
) -> list[list[int]]:
    """Greedy answers without their stop token, which is the model's own or one of ``stop_ids``.

    Prompts of similar length run as a batch of at most ``max_tokens`` prompt and answer tokens; of equal length if the
    model cannot be padded. Answers equal those of single prompts, unless two tokens are equally likely up to rounding.
    After each token ``beat`` gets the number of finished answers, with unfinished ones as fractions.
    """
    model.module.eval()
    ends = stop_ids | model.eos_ids
    padded = len(prompts) > 1 and model.continues_padded
    answers: list[list[int]] = [[] for _ in prompts]
    answered = 0
    for group in _groups([len(prompt) for prompt in prompts], max_new_tokens, max_tokens, padded=padded):
        before = answered
        together = Continuations(model.module, [prompts[index] for index in group], padded=padded)
        last = mx.array([prompts[index][-1] for index in group])
        for tokens in _greedy(together, last, ends, max_new_tokens):
            for row, token in tokens.items():
                answers[group[row]].append(token)
            longest = max((len(answers[group[row]]) for row in tokens), default=0)
            beat(before + len(group) - len(tokens) * (1 - longest / max_new_tokens))
        answered += len(group)
    return answers


def _groups(lengths: Sequence[int], max_new_tokens: int, max_tokens: int, *, padded: bool) -> list[list[int]]:
    """Indices of prompts for each batch, the longest first."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[groups[-1][0]] if groups else 0
        full = not groups or len(groups[-1]) >= min(MOST_ROWS, max_tokens // (longest + max_new_tokens))
        if full or not (padded or lengths[index] == longest):
            groups.append([])
        groups[-1].append(index)
    return groups


def _greedy(
    together: Continuations, tokens: mx.array, ends: frozenset[int], max_new_tokens: int
) -> Iterator[dict[int, int]]:
    """Yield the next token of each unfinished row, by row index, until all end or ``max_new_tokens`` is reached."""
    places = list(range(tokens.shape[0]))  # of rows in the batch
    open_rows = set(places)
    for _ in range(max_new_tokens):
        tokens = mx.argmax(together.next_logits(tokens), axis=-1)  # (rows,)
        new = dict(zip(places, np.array(tokens).tolist(), strict=True))
        open_rows -= {row for row, token in new.items() if token in ends}
        yield {row: token for row, token in new.items() if row in open_rows}
        if not open_rows:
            return
        if together.rows_may_leave and len(open_rows) < len(places):
            tokens = together.keep([place for place, row in enumerate(places) if row in open_rows], tokens)
            places = [row for row in places if row in open_rows]

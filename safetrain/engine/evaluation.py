"""Measures a model on rows: loss per trained token, and greedy answers. Nothing random, nothing trained."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from safetrain.core.chat import Rendered
from safetrain.engine.batches import in_order
from safetrain.engine.loss import summed_loss
from safetrain.engine.model import BaseModel


@dataclass(frozen=True)
class Loss:
    """Cross-entropy in nats per trained token, over ``trained_tokens`` labels."""

    mean: float
    trained_tokens: int


def measure_loss(model: BaseModel, data: Sequence[Rendered], batch_size: int) -> Loss:
    """Mean loss over every label of ``data``, each row seen once. Leaves the model in evaluation mode."""
    model.module.eval()
    total, tokens = 0.0, 0
    for batch in in_order(data, batch_size):
        total += float(np.array(summed_loss(model.module, batch)))
        tokens += sum(data[row].trained_tokens for row in batch.rows)
    return Loss(total / tokens, tokens)


def answer(model: BaseModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int) -> list[list[int]]:
    """Greedy continuations without their closing token. Prompts of one length run together, so none is padded."""
    model.module.eval()
    by_length = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    answers: list[list[int]] = [[] for _ in prompts]
    for length in sorted(by_length):
        group = by_length[length]
        for start in range(0, len(group), batch_size):
            chosen = group[start : start + batch_size]
            found = _greedy(model, mx.array([list(prompts[index]) for index in chosen]), max_new_tokens)
            for index, ids in zip(chosen, found, strict=True):
                answers[index] = ids
    return answers


def _greedy(model: BaseModel, prompts: mx.array, max_new_tokens: int) -> list[list[int]]:
    """Continue each row of ``prompts`` (rows, tokens) until it ends or ``max_new_tokens`` are made."""
    cache = make_prompt_cache(model.module)
    answers: list[list[int]] = [[] for _ in range(prompts.shape[0])]
    open_rows = set(range(len(answers)))
    tokens = prompts
    for _ in range(max_new_tokens):
        chosen = mx.argmax(model.module(tokens, cache=cache)[:, -1, :], axis=-1)  # (rows,)
        tokens = chosen[:, None]
        for row, token in enumerate(np.array(chosen).tolist()):
            if row in open_rows and token in model.eos_ids:
                open_rows.discard(row)
            elif row in open_rows:
                answers[row].append(token)
        if not open_rows:
            break
    return answers

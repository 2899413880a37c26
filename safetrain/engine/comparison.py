"""Base and tuned model side by side on the same rows: the loss of each row, and answers to their questions."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from safetrain.core.data.held_out import HeldOut
from safetrain.core.memory.answering import tokens_to_hold
from safetrain.core.memory.terms import FLOAT32
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.evaluating import Measured
from safetrain.core.records.reports import RunShape
from safetrain.core.records.scoring import require_number
from safetrain.engine.adapter_folder import apply_adapter
from safetrain.engine.evaluation import MOST_ROWS, answer, row_losses
from safetrain.engine.limits import set_limits
from safetrain.engine.model import BaseModel, dequantize_to_answer, open_base

Answers = dict[int, list[int]]  # ids, by the question's number
Beat = Callable[[str, int, float], None]  # which model answers, how many questions it has, how many are answered
FIRST_QUESTIONS = MOST_ROWS  # that are answered however long it takes: fewer take hardly less, and say little
QUICK_WORK = 1e11  # weights times tokens of answers that nobody waits for: a second or two on two cores


@dataclass(frozen=True)
class Answering:
    """How much is answered: ``max_questions``, or as many as ``seconds`` allow for both models."""

    max_new_tokens: int
    max_questions: int | None
    seconds: float


def compare(
    base: Path, adapter: Path, held_out: HeldOut, run: RunShape, answering: Answering, beat: Beat
) -> tuple[Measured, Measured]:
    """The base, then the same with the adapter on it, asked the same questions. ``run``: how it was trained.

    A base that was left quantized in training is dequantized where there is room: its numbers are the same. Raises
    TrainingError where a loss is not a number.
    """
    files = read_model_files(base)
    dequantize = files.quantization_bits is not None and not run.dequantize_base and dequantize_to_answer(files)
    limit = run.mlx_limit_bytes + (FLOAT32 * files.parameters if dequantize else 0)
    set_limits(limit)
    model = open_base(base, dequantize=run.dequantize_base or dequantize, compute_dtype=run.compute_dtype)
    asked = _Asked(model, files, limit, held_out, answering.max_new_tokens, beat)
    order = in_random_order(len(held_out.questions))[: answering.max_questions]
    losses = _losses(model, held_out, run.most_tokens, "base")
    first = max(FIRST_QUESTIONS, int(QUICK_WORK / (files.parameters * answering.max_new_tokens)))
    seconds = answering.seconds / 2 if answering.max_questions is None else math.inf
    by_base = in_time(partial(asked.answers, "base"), order, first, seconds)
    apply_adapter(model, adapter)
    tuned_losses = _losses(model, held_out, run.most_tokens, "tuned")
    by_tuned = in_time(partial(asked.answers, "tuned"), list(by_base), first, seconds)
    return Measured(losses, {number: by_base[number] for number in by_tuned}), Measured(tuned_losses, by_tuned)


def _losses(model: BaseModel, held_out: HeldOut, most_tokens: int, name: str) -> np.ndarray:
    losses = row_losses(model, held_out.rows, most_tokens)
    require_number(float(losses.sum()), name)
    return losses


@dataclass(frozen=True)
class _Asked:
    """A model that answers in the memory that its training took."""

    model: BaseModel
    files: ModelFiles
    limit_bytes: int
    held_out: HeldOut
    max_new_tokens: int
    beat: Beat

    def answers(self, name: str, part: Sequence[int], done: int) -> Answers:
        """To these questions; ``done`` have been answered before."""
        room = self.limit_bytes - mx.get_active_memory()
        prompts = [self.held_out.questions[number].prompt for number in part]
        most = tokens_to_hold(self.files, self.max_new_tokens, room)
        ids = answer(
            self.model, prompts, self.held_out.stop_ids, self.max_new_tokens, most,
            lambda made: self.beat(name, done + len(part), done + made),
        )  # fmt: skip
        return dict(zip(part, ids, strict=True))


def in_random_order(count: int) -> list[int]:
    """The numbers below ``count``, always the same way: a longer sample holds a shorter one."""
    order = list(range(count))
    random.Random(0).shuffle(order)
    return order


def in_time(
    ask: Callable[[Sequence[int], int], Answers],
    order: Sequence[int],
    first: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Answers:
    """Answers to as many questions of ``order`` as ``seconds`` allow, at least to the ``first`` so many.

    They are asked in growing parts. A larger part takes longer than the last one in proportion at most, and none is
    begun in less time than that took.
    """
    found: Answers = {}
    end, size = clock() + seconds, first
    while size and len(found) < len(order):
        part, began = order[len(found) : len(found) + size], clock()
        found |= ask(part, len(found))
        parts_left = (end - clock()) / max(1e-9, clock() - began)
        size = int(min(2.0, parts_left) * len(part)) if parts_left >= 1 else 0
    return found

"""Models side by side: the loss of each held-out row and of general text, and answers to the rows' questions."""

import dataclasses
import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from safetrain.core.data.general_text import GeneralText
from safetrain.core.data.held_out import HeldOut
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.memory.terms import FLOAT32
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.evaluation import require_number
from safetrain.core.records.metrics import RunShape
from safetrain.core.records.scoring import ModelMeasures
from safetrain.engine.adapter_folder import apply_adapter
from safetrain.engine.backend import set_limits
from safetrain.engine.batches import MicroBatch
from safetrain.engine.evaluation import MOST_ROWS, answer, row_losses
from safetrain.engine.model import BaseModel, dequantize_to_answer, open_base

Answers = dict[int, list[int]]  # ids, by the question's number
Beat = Callable[[str, str, int, float], None]  # which model, at what work, how many there are, how many are done
FIRST_QUESTIONS = MOST_ROWS  # that are answered however long it takes: fewer take hardly less, and say little
CACHE_COPIES = 2  # of keys and values: a cache that grows is copied
LOGIT_ROWS = 2  # float32 numbers per logit alive while a token is chosen
QUICK_WORK = 1e11  # weights times tokens of answers that take no noticeable time: a second or two on two cores


@dataclass(frozen=True)
class Answering:
    """How much is answered: ``max_questions``, or as many as ``seconds`` allow for both models."""

    max_new_tokens: int
    max_questions: int | None
    seconds: float


@dataclass(frozen=True)
class Material:
    """What models are compared on."""

    held_out: HeldOut
    general: GeneralText


@dataclass(frozen=True)
class Subject:
    """A model to measure."""

    name: str  # base, tuned
    folder: Path
    adapter: Path | None = None  # on it


def compare(
    base: Subject, tuned: Subject, material: Material, run: RunShape, answering: Answering, beat: Beat
) -> tuple[ModelMeasures, ModelMeasures]:
    """Two models, one after the other, asked the same questions. ``run``: in how much memory.

    A base that was left quantized in training is dequantized where there is room: its numbers are the same. Raises
    TrainingError where a loss is not a number.
    """
    model = _open(base, material, run, answering, beat)
    first = model.measured(in_random_order(len(material.held_out.questions))[: answering.max_questions], halves=2)
    if tuned.folder == base.folder and base.adapter is None and tuned.adapter is not None:
        apply_adapter(model.model, tuned.adapter)
        model = dataclasses.replace(model, name=tuned.name)
    else:
        del model
        gc.collect()
        model = _open(tuned, material, run, answering, beat)
    second = model.measured(list(first.answers), halves=2)
    both = {number: first.answers[number] for number in second.answers}
    return dataclasses.replace(first, answers=both), second


def measure(subject: Subject, material: Material, run: RunShape, answering: Answering, beat: Beat) -> ModelMeasures:
    """The evaluation of one model."""
    order = in_random_order(len(material.held_out.questions))[: answering.max_questions]
    return _open(subject, material, run, answering, beat).measured(order)


def _open(subject: Subject, material: Material, run: RunShape, answering: Answering, beat: Beat) -> "_MeasuredModel":
    files = read_model_files(subject.folder)
    dequantize = files.quantization_bits is not None and not run.dequantize_base and dequantize_to_answer(files)
    limit = run.mlx_limit_bytes + (FLOAT32 * files.parameters if dequantize else 0)
    set_limits(limit)
    model = open_base(subject.folder, dequantize=run.dequantize_base or dequantize, compute_dtype=run.compute_dtype)
    if subject.adapter is not None:
        apply_adapter(model, subject.adapter)
    return _MeasuredModel(subject.name, model, files, limit, material, run.most_tokens, answering, beat)


@dataclass(frozen=True)
class _MeasuredModel:
    """A model that is measured in the memory that its training took."""

    name: str
    model: BaseModel
    files: ModelFiles
    limit_bytes: int
    material: Material
    most_tokens: int
    answering: Answering
    beat: Beat

    def measured(self, order: Sequence[int], halves: int = 1) -> ModelMeasures:
        """Losses on all rows, answers in ``order``; one of ``halves`` models shares the time for these."""
        losses = self._losses(self.material.held_out.rows, "test rows", "test rows read")
        general = self._losses(self.material.general.rows, "general text", "general texts read")
        first = max(FIRST_QUESTIONS, int(QUICK_WORK / (self.files.parameters * self.answering.max_new_tokens)))
        seconds = self.answering.seconds / halves if self.answering.max_questions is None else math.inf
        return ModelMeasures(losses, in_time(self._answers, order, first, seconds), general)

    def _losses(self, rows: TokenRows, text_name: str, work: str) -> np.ndarray:
        rows_begun = 0

        def beat(batch: MicroBatch, _number: int) -> None:
            nonlocal rows_begun
            self.beat(self.name, work, len(rows), rows_begun)
            rows_begun += len(batch.rows)

        losses = row_losses(self.model, rows, self.most_tokens, beat) if len(rows) else np.zeros(0)
        require_number(float(losses.sum()), self.name, text_name)
        return losses

    def _answers(self, part: Sequence[int], done: int) -> Answers:
        """To these questions; ``done`` have been answered before."""
        questions, new = self.material.held_out.questions, self.answering.max_new_tokens
        most = tokens_to_hold(self.files, new, self.limit_bytes - mx.get_active_memory())
        ids = answer(
            self.model, [questions[number].prompt for number in part], self.material.held_out.stop_ids, new, most,
            lambda made: self.beat(self.name, "questions answered", done + len(part), done + made),
        )  # fmt: skip
        return dict(zip(part, ids, strict=True))


def tokens_to_hold(model: ModelFiles, max_new_tokens: int, room_bytes: int) -> int:
    """Tokens whose keys, values and share of their row's logits fit in ``room_bytes``; at least 1."""
    cache = CACHE_COPIES * 2 * model.num_layers * model.num_kv_heads * model.head_dim * FLOAT32
    logits = LOGIT_ROWS * FLOAT32 * model.vocab_size / max_new_tokens
    return max(1, int(room_bytes / (cache + logits)))


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

    Questions are answered in growing parts. A larger part takes at most proportionally longer than the last
    one, and starts only if that much time is left.
    """
    answers: Answers = {}
    end, size = clock() + seconds, first
    while size and len(answers) < len(order):
        part, began = order[len(answers) : len(answers) + size], clock()
        answers |= ask(part, len(answers))
        parts_left = (end - clock()) / max(1e-9, clock() - began)
        size = int(min(2.0, parts_left) * len(part)) if parts_left >= 1 else 0
    return answers

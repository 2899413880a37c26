"""Compares models: loss on each held-out row and on general text, and answers to the rows' questions."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.errors import TrainingError
from safetrain.core.memory.terms import FLOAT32
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.schema import LOWER_RATE
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.backend import set_limits
from safetrain.engine.batches import MicroBatch
from safetrain.engine.evaluation import answer, option_logprobs, row_losses
from safetrain.engine.model import BaseModel, dequantize_to_answer, open_base
from safetrain.engine.weight_files import apply_adapter
from safetrain.evaluate.exam import Exam, ModelMeasures
from safetrain.evaluate.scoring import GeneralText

CACHE_COPIES = 2  # of keys and values: a growing cache is copied
NO_LOSSES = np.zeros(0)
LOGIT_ROWS = 4  # float32 numbers per logit alive while tokens are chosen: of this token and the next


@dataclass(frozen=True)
class Examination:
    """The data that models are measured on, and the limits: memory, time, questions, and tokens per answer."""

    general: GeneralText
    run: TrainSettings
    mlx_limit_bytes: int  # of mlx, in the training
    exam: Exam
    beat: Callable[[str, str, int, float], None]  # model, kind of work, total, done so far

    def measure(self, base: Path, start: Path | None, tuned: Path) -> tuple[ModelMeasures, ModelMeasures]:
        """Measure the base, with the adapter ``start`` if given, then with ``tuned``, on the same rows and questions.

        Raises TrainingError if a loss is not a number.
        """
        measures, model, files = list[ModelMeasures](), None, read_model_files(base)
        for name, adapter in (("base", start), ("tuned", tuned)):
            if model is None or start is not None:  # an adapter needs a model without one
                model = None
                gc.collect()
                model, limit_bytes = self._open(files)
            if adapter is not None:
                apply_adapter(model, adapter)
            losses = self._losses(name, model, self.exam.held_out.rows, "test rows")
            general = self._losses(name, model, self.general.rows, "general texts")
            measures.append(replace(self._answers(name, model, files, limit_bytes), losses=losses, general=general))
        return measures[0], measures[1]

    def answers(self, base: Path, tuned: Path) -> ModelMeasures:
        """The answers of one model alone."""
        files = read_model_files(base)
        model, limit_bytes = self._open(files)
        apply_adapter(model, tuned)
        return self._answers("", model, files, limit_bytes)

    def _open(self, files: ModelFiles) -> tuple[BaseModel, int]:
        """Open the model, dequantized if memory allows; returns it and mlx's memory limit, at least the training's."""
        run, dequantize = self.run, self.run.dequantize_base
        limit_bytes = self.mlx_limit_bytes
        is_kept = files.quantization_bits is not None and not dequantize and not run.stream_base
        if is_kept and dequantize_to_answer(files):
            dequantize, limit_bytes = True, limit_bytes + FLOAT32 * files.parameters
        set_limits(limit_bytes)
        model = open_base(files.folder, dequantize=dequantize, compute_dtype=run.compute_dtype, stream=run.stream_base)
        return model, limit_bytes

    def _answers(self, name: str, model: BaseModel, files: ModelFiles, limit_bytes: int) -> ModelMeasures:
        held_out, exam, longest = self.exam.held_out, self.exam, self.exam.max_new_tokens
        order = [number for number in exam.rows if number not in exam.choices]
        cache = CACHE_COPIES * 2 * files.num_layers * files.num_kv_heads * files.head_dim * FLOAT32
        token_bytes = cache + LOGIT_ROWS * FLOAT32 * files.vocab_size / longest  # with a share of its row's logits
        prompts = [held_out.questions[number].prompt for number in order]
        most_tokens = max(1, int((limit_bytes - mx.get_active_memory()) / token_bytes))
        ids = answer(
            model, prompts, held_out.stop_ids, longest, most_tokens,
            lambda done: self.beat(name, "questions answered", len(order), done),
        )  # fmt: skip
        asked = [*exam.choices.values(), *(exam.calibration if name == "tuned" else ())]
        found = option_logprobs(
            model, [choice.prompt for choice in asked], [choice.options for choice in asked],
            lambda done: self.beat(name, "questions answered", len(asked), done),
        )  # fmt: skip
        options, fitted = dict(zip(exam.choices, found, strict=False)), found[len(exam.choices) :]
        return ModelMeasures(NO_LOSSES, dict(zip(order, ids, strict=True)), NO_LOSSES, options, fitted)

    def _losses(self, name: str, model: BaseModel, rows: TokenRows, kind: str) -> np.ndarray:
        begun = 0

        def beat(batch: MicroBatch) -> None:
            nonlocal begun
            self.beat(name, f"{kind} read", len(rows), begun)
            begun += len(batch.rows)

        losses = row_losses(model, rows, self.run.most_tokens, beat)
        if not np.isfinite(losses).all():
            raise TrainingError(
                f"The loss of the {name} model on the {kind} is not a number.",
                do=f"train again with {LOWER_RATE}, or check the model: safetrain selftest MODEL",
            )
        return losses

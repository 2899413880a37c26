"""The test rows, which neither training nor the choice of the adapter uses, and their questions."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from safetrain.core.data.store import Store
from safetrain.core.data.token_rows import Question, TokenRows
from safetrain.core.data.windows import MOST_VALID_TOKENS, TokenWindows
from safetrain.core.formatting import counted
from safetrain.core.records.schema import PRETRAIN


@dataclass(frozen=True)
class HeldOut:
    """The test rows and questions on which the tuned model is compared with its base."""

    rows: TokenRows  # truncated as in training; the pieces of windows after pretraining on documents
    questions: tuple[Question, ...]
    stop_ids: frozenset[int]
    where: Callable[[int], str]  # file:line of a row
    rows_available: int  # ``rows`` may be an evenly spaced sample of them
    questions_available: int

    def remarks(self, max_seq_length: int, max_new_tokens: int) -> list[str]:
        """Remarks about truncated rows and expected answers."""
        texts = []
        if self.rows.cut_rows:
            texts.append(
                f"{counted(self.rows.cut_rows, 'test row')} truncated to {max_seq_length} tokens as in training"
            )
        longest = max((len(question.answer) for question in self.questions), default=0)
        if longest > max_new_tokens:
            texts.append(f"warning: expected answers have up to {longest} tokens; evaluate.max_new_tokens cuts them")
        return texts


def held_out_in(
    store: Store,
    max_examples: int | None,
    max_seq_length: int,
    method: str = "lora",
    most_tokens: int | None = None,
) -> HeldOut:
    """The first ``max_examples`` rows of a store, truncated, with their questions, for a model trained by ``method``.

    ``max_examples`` None: all rows, or evenly spaced ones with ``most_tokens`` tokens in all.
    """
    most_tokens = most_tokens if max_examples is None else None
    first, ends = store.rows[:max_examples], frozenset(store.made.stop_ids)
    if method == PRETRAIN and not len(store.questions):
        windows = TokenWindows(first, max_seq_length, ends)
        rows = windows.some(min(MOST_VALID_TOKENS, most_tokens or MOST_VALID_TOKENS))
        return HeldOut(rows, (), ends, store.where, len(rows), 0)
    cut = first.cut(max_seq_length)
    sample = np.arange(len(cut)) if most_tokens is None else cut.sample(most_tokens)
    rows = cut.take(sample)
    rows.cut_rows = int(np.count_nonzero(first.lengths[sample] > max_seq_length))
    place = {int(row): index for index, row in enumerate(sample)}
    chosen = (store.questions[number] for number in np.flatnonzero(np.isin(store.questions.rows, sample)).tolist())
    questions = tuple(dataclasses.replace(question, row=place[question.row]) for question in chosen)
    available = int(np.count_nonzero(store.questions.rows < len(cut)))
    return HeldOut(rows, questions, ends, lambda row: store.where(int(sample[row])), len(cut), available)

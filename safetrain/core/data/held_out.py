"""The rows of the test file, which neither training nor the choice of adapter has seen, and the questions in them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.store import Store, open_store, store_path
from safetrain.core.data.token_rows import Question, TokenRows
from safetrain.core.data.windows import MOST_VALID_TOKENS, TokenWindows
from safetrain.core.formatting import counted
from safetrain.core.model.files import tokenizer_hash
from safetrain.core.records.schema import PRETRAIN
from safetrain.core.storage import paths


@dataclass(frozen=True)
class HeldOut:
    """What base and tuned are compared on."""

    rows: TokenRows  # cut as in training; after a training from scratch on documents, the pieces of windows
    questions: tuple[Question, ...]
    stop_ids: frozenset[int]
    where: Callable[[int], str]  # file:line of a row

    def remarks(self, max_seq_length: int, max_new_tokens: int) -> list[str]:
        """What the result does not show: rows and expected answers that are cut off."""
        found = []
        if self.rows.cut_rows:
            found.append(f"{counted(self.rows.cut_rows, 'test row')} cut to {max_seq_length} tokens, as in training")
        longest = max((len(question.answer) for question in self.questions), default=0)
        if longest > max_new_tokens:
            found.append(
                f"warning: expected answers have up to {longest} tokens, evaluate.max_new_tokens cuts them off"
            )
        return found


def load_held_out(base: Path, max_examples: int | None, max_seq_length: int, method: str = "lora") -> HeldOut:
    """The first ``max_examples`` rows (None: all), cut, and their questions; raises ConfigError, DataError."""
    found = open_store(store_path(paths.VALIDATED, "test"), tokenizer_hash(base))
    return held_out_in(found, max_examples, max_seq_length, method)


def held_out_in(store: Store, max_examples: int | None, max_seq_length: int, method: str = "lora") -> HeldOut:
    """The same of any store. ``method``: that the model was trained by."""
    some, ends = store.rows if max_examples is None else store.rows[:max_examples], frozenset(store.made.stop_ids)
    if method == PRETRAIN and not store.questions:
        return HeldOut(TokenWindows(some, max_seq_length, ends).some(MOST_VALID_TOKENS), (), ends, store.where)
    rows = some.cut(max_seq_length)
    questions = tuple(question for question in store.questions if question.row < len(rows))
    return HeldOut(rows, questions, ends, store.where)

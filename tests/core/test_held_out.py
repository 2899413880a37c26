"""What base and tuned are compared on: all tokens of documents, as a training from scratch reads them."""

from pathlib import Path

from safetrain.core.data.held_out import held_out_in
from safetrain.core.data.store import open_store
from safetrain.core.data.token_rows import Question, token_row
from tests.stores import MADE, write_store

BOOKS = [token_row(range(1, tokens + 1), [True] * tokens) for tokens in (500, 90, 7)]


def test_of_documents_every_token_but_the_first_is_measured(tmp_path: Path) -> None:
    """Cut like rows, all but the beginning of a book would be left out."""
    store = open_store(write_store(tmp_path / "test.tokens.safetensors", BOOKS), MADE.tokenizer)
    windows = held_out_in(store, None, 32, "pretrain").rows
    opens = sum(BOOKS[0].ids[-1] not in MADE.stop_ids for _ in BOOKS[1:])  # nothing predicts a first token then
    assert windows.label_counts.sum() == 597 - 1 - opens
    assert windows.cut_rows == 0
    assert held_out_in(store, None, 32).rows.label_counts.sum() < 80
    assert held_out_in(store, 1, 32, "pretrain").rows.label_counts.sum() == 499


def test_a_sample_is_from_all_over_and_has_its_own_questions_and_places(tmp_path: Path) -> None:
    rows = [token_row(range(1, 12), [False] * 5 + [True] * 6) for _ in range(100)]
    asked = [Question(row, (row,), (2,), str(row)) for row in range(100)]
    store = open_store(write_store(tmp_path / "test.tokens.safetensors", rows, questions=asked), MADE.tokenizer)
    found = held_out_in(store, None, 8, most_tokens=70)
    assert (len(found.rows), found.rows_available, found.rows.cut_rows) == (10, 100, 10)
    assert found.questions_available == 100
    assert len(held_out_in(store, None, 8, "pretrain").rows) == 100, "rows with questions stay rows"
    assert [question.text for question in found.questions] == [str(row) for row in range(0, 100, 11)]
    for question in found.questions:
        assert found.where(question.row) == store.where(int(question.text))
    assert len(held_out_in(store, None, 8, most_tokens=700).rows) == 100
    assert len(held_out_in(store, None, 8, most_tokens=1).rows) == 1

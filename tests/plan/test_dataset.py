"""Splitting is deterministic and fair; reports count what is there; overlaps and repetitions are told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import DataError
from safetrain.plan.dataset import Splits, check_dataset, load_splits
from tests.conftest import EMBEDDED, chat

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(EMBEDDED)


def texts(splits: Splits) -> dict[str, set[str]]:
    return {name: {sourced.row.identity() for sourced in rows} for name, rows in splits.named()}


def test_one_file_is_split_by_content_whatever_its_order(write_jsonl: Write) -> None:
    rows: list[object] = [chat(f"question {n}", f"answer {n}") for n in range(50)]
    one = load_splits(write_jsonl("a.jsonl", rows), 0.1, 0.2)
    two = load_splits(write_jsonl("b.jsonl", rows[::-1]), 0.1, 0.2)
    assert texts(one) == texts(two)
    assert [len(part) for _, part in one.named()] == [35, 5, 10]
    assert len(set().union(*texts(one).values())) == 50


def test_rows_with_one_question_stay_together(write_jsonl: Write) -> None:
    rows: list[object] = [chat(f"question {n % 10}", f"answer {n}") for n in range(60)]
    splits = load_splits(write_jsonl("a.jsonl", rows), 0.2, 0.2)
    asked = [{sourced.row.question() for sourced in part} for _, part in splits.named()]
    assert sum(map(len, asked)) == 10
    assert all(asked)


def test_a_folder_without_a_test_file_splits_only_that_off(write_jsonl: Write) -> None:
    path = write_jsonl("d/train.jsonl", [chat(f"q{n}", "a") for n in range(20)])
    write_jsonl("d/valid.jsonl", [chat("v", "a")])
    splits = load_splits(path.parent, 0.1, 0.1)
    assert [len(part) for _, part in splits.named()] == [18, 1, 2]
    assert "test (2 rows) split off train" in splits.how


def test_too_few_rows_to_split_is_an_error(write_jsonl: Write) -> None:
    with pytest.raises(DataError, match="Too few different rows"):
        load_splits(write_jsonl("a.jsonl", [chat("same", "a"), chat("same", "b"), chat("other", "c")]), 0.1, 0.1)
    three = load_splits(write_jsonl("b.jsonl", [chat("a", "a"), chat("b", "b"), chat("c", "c")]), 0.1, 0.1)
    assert [len(part) for _, part in three.named()] == [1, 1, 1]


def test_missing_data_and_a_folder_without_train_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_splits(tmp_path / "no", 0.1, 0.1)
    with pytest.raises(DataError, match=r"no train\.jsonl"):
        load_splits(tmp_path, 0.1, 0.1)


def test_the_report_counts_tokens_and_tells_overlaps(write_jsonl: Write, tokenizer: ChatTokenizer) -> None:
    path = write_jsonl("d/train.jsonl", [chat("iron", "Fe"), chat("iron", "Fe"), chat("a longer question", "one")])
    write_jsonl("d/valid.jsonl", [chat("iron", "Fe")])
    write_jsonl("d/test.jsonl", [chat("other", "x")])
    report = check_dataset(load_splits(path.parent, 0.1, 0.1), tokenizer, path.parent)
    assert (report.train.rows, report.valid.rows, report.test.rows) == (3, 1, 1)
    assert report.train.lengths.max > report.train.lengths.p50
    assert report.train.trained_tokens < report.train.tokens
    text = "\n".join(report.warnings)
    assert "train and valid share 1 row" in text
    assert "train.jsonl:2 repeats" in text


def test_rows_that_the_template_refuses_are_named(write_jsonl: Write, tokenizer: ChatTokenizer) -> None:
    odd = {"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]}
    path = write_jsonl("a.jsonl", [chat(f"q{n}", "a") for n in range(5)] + [odd])
    with pytest.raises(DataError, match=r"a\.jsonl:6: the model's chat template refuses it"):
        check_dataset(load_splits(path, 0.1, 0.1), tokenizer, path)


def test_an_answer_beyond_the_context_is_named(write_jsonl: Write, tokenizer: ChatTokenizer) -> None:
    """An answer of which nothing is left would be a loss of nothing over nothing."""
    path = write_jsonl(
        "a.jsonl", [*(chat(f"q{n}", "a") for n in range(5)), chat("iron " * 40, "Fe"), chat("q", "Fe " * 60)]
    )
    splits = load_splits(path, 0.2, 0.2)
    assert check_dataset(splits, tokenizer, path, 512)
    with pytest.raises(
        DataError, match=r"a\.jsonl:6: its answer begins at token \d+, beyond the model's context of 32"
    ):
        check_dataset(splits, tokenizer, path, 32)

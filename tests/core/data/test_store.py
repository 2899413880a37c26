"""A store gives back what was written; a damaged or foreign one is named."""

import dataclasses
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from safetrain.core.data.store import VERSION, open_store, read_made, store_path
from safetrain.core.data.token_rows import Question, TokenRow, TokenRows, token_row
from safetrain.core.data.training_rows import load_training_rows
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.model.files import tokenizer_hash
from safetrain.data.split import StoreWriter
from tests.stores import MADE, add_row, write_store, write_stores

SOURCE = np.random.default_rng(9)
QUESTIONS = [Question(0, (1, 2, 3), (4, 2), "Wie heißt du?"), Question(2, (9,), (), ""), Question(2, (), (5,), "日本")]


def random_row(tokens: int, share: float = 0.3) -> TokenRow:
    trained = SOURCE.random(tokens) < share
    trained[SOURCE.integers(1, tokens)] = True
    return token_row(SOURCE.integers(0, 2**18, tokens).tolist(), trained.tolist())


ROWS = [random_row(int(tokens)) for tokens in SOURCE.integers(2, 60, 40)]


def same(one: TokenRow, other: TokenRow) -> bool:
    return np.array_equal(one.ids, other.ids) and np.array_equal(one.trained, other.trained)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = write_store(tmp_path / "new" / "train.tokens.safetensors", ROWS, questions=QUESTIONS)
    store = open_store(path, MADE.tokenizer)
    assert (store.made, read_made(path)) == (MADE, MADE)
    assert len(store.rows) == len(ROWS)
    assert all(same(found, row) for found, row in zip(store.rows, ROWS, strict=True))
    assert store.rows.lengths.tolist() == [len(row) for row in ROWS]
    assert store.rows.label_counts.tolist() == [row.labels for row in ROWS]
    assert list(map(store.question, range(len(store.question_rows)))) == QUESTIONS
    assert store.where(3) == "train.tokens.jsonl:4"
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing else is left
    assert open_store(write_store(tmp_path / "less", ROWS[:-1])).digest != store.digest
    again = write_store(tmp_path / "later", ROWS, dataclasses.replace(MADE, made_on="2027-01-01"))
    assert open_store(again).digest == store.digest, "of the rows alone"
    arrays = load_file(path)  # as other tools open it
    assert arrays["ids"].tolist() == [token for row in ROWS for token in row.ids.tolist()]
    assert arrays["row_ends"].tolist() == np.cumsum([len(row) for row in ROWS]).tolist()


def with_header(path: Path, **changes: object) -> Path:
    """The same arrays under another header."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    text = json.dumps({**json.loads(content[8 : 8 + length]), **changes}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return path


def test_a_store_that_is_cut_off_changed_or_of_another_version_is_damaged(tmp_path: Path) -> None:
    made = json.dumps(dataclasses.asdict(MADE))
    metadata = {"version": str(VERSION), "digest": "", "made": made, "files": "[]", "label_bytes": "0"}
    path = write_store(tmp_path / "a", ROWS)
    open_store(with_header(path, __metadata__=metadata))
    content = path.read_bytes()
    for left in (0, 5, 100, -1):
        path.write_bytes(content[:left])
        with pytest.raises(DataError, match="damaged"):
            open_store(path)
    for change in ({"version": "0"}, {"made": "{"}, {"made": '{"stop_ids": []}'}, {"files": "["}):
        with pytest.raises(DataError, match="damaged"):
            open_store(with_header(write_store(tmp_path / "b", ROWS), __metadata__={**metadata, **change}))
    with pytest.raises(DataError, match="damaged"):
        open_store(with_header(write_store(tmp_path / "c", ROWS), ids=None))


def test_what_is_missing_is_named_and_a_writer_that_does_not_finish_leaves_nothing(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "a") as writer:
        add_row(writer, ROWS[0], 1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        ConfigError, match=r"train\.tokens\.safetensors does not exist yet[^$]*run the pipeline: safetrain run"
    ):
        open_store(store_path(tmp_path, "train"))
    assert read_made(tmp_path / "a") is None


def test_rows_of_another_tokenizer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    for folder, text in ((base, "{}"), (other, "{} ")):
        (folder / "additional_chat_templates").mkdir(parents=True)
        (folder / "tokenizer.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    write_stores(Path("data/validated"), base, ROWS, ROWS[:3])
    rows = load_training_rows(base, 7).at_length(16, "lora")
    assert (len(rows.train), len(rows.valid), int(rows.train.documents.lengths.max())) == (7, 3, 16)
    with pytest.raises(ConfigError, match="another tokenizer"):
        load_training_rows(other, None)
    before = tokenizer_hash(base)
    for name, counts in (("model.safetensors", False), ("additional_chat_templates/tools.jinja", True)):
        (base / name).write_text("x")
        assert (tokenizer_hash(base) != before) is counts


def plain_cut(row: TokenRow, size: int) -> tuple[list[int], list[bool]]:
    ids, trained = row.ids.tolist(), row.trained.tolist()
    if len(ids) <= size:
        return ids, trained
    later = max(0, trained.index(True, 1) - size // 2)
    start = max((0, later), key=lambda place: sum(trained[place + 1 : place + size]))
    return ids[start : start + size], trained[start : start + size]


@pytest.mark.parametrize("size", [8, 33, 2000])
def test_cut_is_what_a_plain_loop_does(tmp_path: Path, size: int) -> None:
    rows = [random_row(int(tokens), share) for tokens in SOURCE.integers(2, 80, 100) for share in (0.3, 0.0)]
    whole = open_store(write_store(tmp_path / "a", rows)).rows
    backwards = np.arange(len(rows))[::-1]
    for found, plain in ((whole, rows), (whole.take(backwards), rows[::-1]), (TokenRows.of(rows), rows)):
        cut = found.cut(size)
        expected = [plain_cut(row, size) for row in plain]
        assert [(row.ids.tolist(), row.trained.tolist()) for row in cut] == expected
        assert cut.lengths.tolist() == [len(ids) for ids, _ in expected]
        assert cut.label_counts.tolist() == [sum(trained[1:]) for _, trained in expected]
        assert cut.cut_rows == sum(len(row) > size for row in plain)
        assert cut.lost_labels == sum(row.labels for row in plain) - int(cut.label_counts.sum())


def test_a_truncated_row_keeps_at_least_the_labels_of_its_first_tokens() -> None:
    """A prompt of size - 1 tokens leaves room for half a window of labels, like a longer one; pairs stay alike."""
    for size in (8, 64, 1024):
        for prompt in {
            1,
            size // 2 - 1,
            size // 2,
            size // 2 + 1,
            max(1, size - 24),
            size - 1,
            size,
            size + 1,
            2 * size,
        }:
            for answer in (1, size // 4, 2 * size):
                row = token_row(range(1, prompt + answer + 1), [False] * prompt + [True] * answer)
                (kept,) = TokenRows.of([row]).cut(size).label_counts.tolist()
                assert kept >= min(answer, max(size // 2, size - prompt)), (size, prompt, answer)
    rows = TokenRows.of([token_row([1] * n, [False] * 60 + [True] * (n - 60)) for n in (62, 200, 300, 90)])
    pairs = TokenRows(rows.ids, rows.trained, rows.starts, rows.lengths, rows.label_counts, rows_per_pair=2).cut(64)
    assert (pairs.starts - rows.starts).tolist() == [0, 0, 0, 0]
    assert (rows.cut(64).starts - rows.starts).tolist() == [0, 28, 28, 28]

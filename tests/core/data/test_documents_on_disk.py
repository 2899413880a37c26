"""Tokens that stay in the files they came in: read as any rows, and refused where a file is another than it was."""

import json
from pathlib import Path

import numpy as np
import pytest

from safetrain.core.data.store import DocumentWriter, Store, open_store
from safetrain.core.data.token_files import Corpus, Stretch, TokenFile, sampled_digest
from safetrain.core.data.token_rows import TokenWindows
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import DataError
from safetrain.data.corpus import byte_lengths
from tests.conftest import EMBEDDED
from tests.corpora import TEXTS, write_ds
from tests.data.models import model_with
from tests.stores import MADE

END = 0
DOCUMENTS = [[5, 6, 7, END], [8, END], [9, 10, 11, 12, END], [13, 14, END], [15, 16, 17, END]]


def token_file(path: Path, token_bytes: int) -> TokenFile:
    return TokenFile(str(path), path.stat().st_size // token_bytes, token_bytes, sampled_digest(path))


@pytest.fixture
def two_files(tmp_path: Path) -> tuple[Store, list[Path]]:
    """Three documents of 2 bytes a token, two of 4; the first document of each file is left out."""
    paths = [write_ds(tmp_path / "a.ds", DOCUMENTS[:3]), write_ds(tmp_path / "b.ds", DOCUMENTS[3:], token_bytes=4)]
    files = (token_file(paths[0], 2), token_file(paths[1], 4))
    with DocumentWriter(tmp_path / "train.tokens.safetensors") as writer:
        writer.add(np.array([2, 5]), 0, np.array([2, 3]))
        writer.add(np.array([4]), 1, np.array([2]))
        writer.finish(MADE, "digest", Corpus(files, (Stretch(0, 4, 11), Stretch(1, 3, 7))), 3.5)
    return open_store(tmp_path / "train.tokens.safetensors"), paths


def test_documents_of_several_files_are_rows_and_windows_of_them(two_files: tuple[Store, list[Path]]) -> None:
    store, paths = two_files
    assert [row.ids.tolist() for row in store.rows] == [DOCUMENTS[1], DOCUMENTS[2], DOCUMENTS[4]]
    assert all(row.ids.dtype == np.uint32 and row.trained.all() for row in store.rows)
    assert [store.where(row) for row in (1, 2)] == [f"{paths[0]}:3", f"{paths[1]}:2"]
    assert (store.label_bytes, len(store.questions)) == (3.5, 0)
    pieces = TokenWindows(store.rows, 100, frozenset({END})).pieces([0])
    assert [row.ids.tolist() for row in pieces] == [DOCUMENTS[1], [END, *DOCUMENTS[2]], [END, *DOCUMENTS[4]]]
    assert pieces.label_counts.tolist() == [1, 5, 4]


@pytest.mark.parametrize("change", ["other bytes", "longer", "gone"])
def test_a_file_that_changed_after_validation_is_refused(change: str, two_files: tuple[Store, list[Path]]) -> None:
    store, paths = two_files
    raw = paths[1].read_bytes()
    paths[1].write_bytes(raw[:-4])
    with pytest.raises(DataError, match="shorter"):  # during training
        _ = store.rows[2]
    paths[1].unlink()
    if change != "gone":
        paths[1].write_bytes(raw[:4] + b"\x01" + raw[5:] if change == "other bytes" else raw * 2)
    with pytest.raises(DataError, match=r"b\.ds") as caught:
        open_store(paths[0].parent / "train.tokens.safetensors")
    assert "validate" in str(caught.value)


def test_bytes_of_ids_add_up_to_the_text() -> None:
    tokenizer = ChatTokenizer(EMBEDDED)
    sizes = byte_lengths(tokenizer)
    text = " ".join(TEXTS[:3]) + " É água, 東京 🚀."
    assert sizes[tokenizer.encode_chat(text)].sum() == len(text.encode())
    assert sizes[tokenizer.end_id] == 0


def test_bytes_of_ids_where_the_vocabulary_is_text(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", None)
    file = model / "tokenizer.json"
    definition = json.loads(file.read_text())
    definition.update(pre_tokenizer=None, normalizer=None, post_processor=None)
    definition["decoder"] = {"type": "ByteFallback"}
    definition["model"] = {"type": "BPE", "vocab": {"▁água": 0, "<0xE6>": 1, "a": 2}, "merges": []}
    definition["added_tokens"] = [{**definition["added_tokens"][0], "id": 3, "content": "<|end|>"}]
    file.write_text(json.dumps(definition))
    assert byte_lengths(ChatTokenizer(model)).tolist() == [6, 1, 1, 0]

"""The general text is whole, and a tokenizer that cannot write it says so instead of a number."""

import collections
import json
import shutil
from pathlib import Path

from safetrain.core.data.held_out import FILE, MOST_TOKENS, general_text
from safetrain.core.data.tokenizer import ChatTokenizer
from tests.conftest import EMBEDDED


def test_there_are_sixty_different_pieces_that_a_tokenizer_expresses() -> None:
    pieces = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    assert collections.Counter(piece["part"] for piece in pieces) == {"english": 24, "portuguese": 24, "code": 12}
    assert len({piece["text"] for piece in pieces}) == 60
    found = general_text(ChatTokenizer(EMBEDDED), 2048, 512)
    assert (len(found.rows), len(found.parts), found.left_out) == (60, 60, 0)
    assert 64 < found.rows.lengths.min() <= found.rows.lengths.max() == MOST_TOKENS
    assert (found.rows.label_counts == found.rows.lengths - 1).all()
    assert general_text(ChatTokenizer(EMBEDDED), 2048, 40).rows.lengths.max() == 40


def test_where_time_is_short_each_part_keeps_its_first_pieces() -> None:
    whole = general_text(ChatTokenizer(EMBEDDED), 2048, 512)
    half = general_text(ChatTokenizer(EMBEDDED), 2048, 512, int(whole.rows.lengths.sum()) // 2)
    assert collections.Counter(half.parts) == {"english": 12, "portuguese": 12, "code": 6}
    assert (half.rows[0].ids == whole.rows[0].ids).all()


def test_pieces_with_letters_that_a_vocabulary_lacks_are_left_out(tmp_path: Path) -> None:
    """Without its bytes above 127 the tokenizer drops accents without a word; so it does braces with none of those."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    value = json.loads((EMBEDDED / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, model = value["model"]["vocab"], value["model"]
    model["vocab"] = {token: number for token, number in vocabulary.items() if token.isascii() or token[0] == "Ġ"}
    kept = model["vocab"]
    model["merges"] = [pair for pair in model["merges"] if all(part in kept for part in pair) and "".join(pair) in kept]
    (folder / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
    found = general_text(ChatTokenizer(folder), 2048, 512)
    assert "portuguese" not in found.parts
    assert found.parts.count("english") >= 20
    assert found.left_out >= 24
    assert len(general_text(ChatTokenizer(EMBEDDED), 100, 512).rows) == 0, "tokens that the model does not have"

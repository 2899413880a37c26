"""Texts: words as numbers, answers in whole characters, the general text."""

import collections
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import CHAT_FILE, PromptFormat, read_prompt_format
from safetrain.core.storage.files import write_record
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.core.text.words import words_of
from safetrain.data.compare import digests
from safetrain.evaluate.scoring import FILE, MOST_TOKENS, general_text
from safetrain.watch.chat import AnswerText, Prompts
from tests.conftest import EMBEDDED

SAME = [
    ("Hello, World!", "hello   world"), ("don't", "DON’T"), ("**bold** word", "bold word"),
    ("well-known", "well known"), ("3-4", "3 - 4"), ("Está CÁ?", "está cá"), ("a\u200bb", "ab"),
    ("café", "cafe\u0301"),
]  # fmt: skip
DIFFERENT = [
    ("3 + 4", "3 * 4"), ("3 + 4", "3 - 4"), ("x*y", "x/y"), ("-3", "3"), ("5%", "5"), ("esta", "está"),
    ("3.5", "35"), ("ab", "a b"), ("中文", "文中"),
]  # fmt: skip


def test_form_alone_is_no_difference_and_signs_accents_and_order_are_one() -> None:
    for pairs, same in ((SAME, True), (DIFFERENT, False)):
        for pair in pairs:
            one, two = digests(words_of(pair)).tolist()
            assert (one == two) is same, pair


TOKENIZER = ChatTokenizer(EMBEDDED)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_an_answer_grows_by_whole_characters_to_what_it_is(text: str) -> None:
    ids = TOKENIZER.encode(text)
    answer, pieces = AnswerText(TOKENIZER), list[str]()
    for number in ids:
        pieces.append(answer.add(number))
        assert answer.text == "".join(pieces)
    assert "".join(pieces) == answer.text == TOKENIZER.decode(ids).strip()
    if "\ufffd" not in text:
        assert "\ufffd" not in answer.text
    cut = AnswerText(TOKENIZER)  # half a character waits for its other half
    assert (cut.add(TOKENIZER.encode("日")[0]), cut.text) == ("", "")


def test_what_was_taught_comes_back_and_a_refusal_of_the_template_is_told(tmp_path: Path) -> None:
    write_record(tmp_path / CHAT_FILE, PromptFormat((1,), "o", "a", "Be brief."))
    assert read_prompt_format(tmp_path) == PromptFormat((1,), "o", "a", "Be brief.")
    (tmp_path / "chat.json").write_text("[]")
    with pytest.raises(ModelError, match="cannot be read"):
        read_prompt_format(tmp_path)
    with pytest.raises(ModelError, match="unknown role bishop"):
        Prompts(TOKENIZER, None).ids([{"role": "bishop", "content": "e4"}])


def test_a_model_of_documents_is_given_the_beginning_of_one() -> None:
    prompts = Prompts(TOKENIZER, PromptFormat((7,), "", documents=True))
    asked = prompts.ids([{"role": "user", "content": "The capital of"}])
    assert asked == [TOKENIZER.end_id, *TOKENIZER.encode("The capital of")]
    assert prompts.continues
    assert not prompts.writes_system("Be brief.")


def test_there_are_sixty_different_pieces_that_a_tokenizer_expresses() -> None:
    pieces = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    assert collections.Counter(piece["part"] for piece in pieces) == {"english": 24, "portuguese": 24, "code": 12}
    assert len({piece["text"] for piece in pieces}) == 60
    found = general_text(ChatTokenizer(EMBEDDED), 2048, 512)
    assert (len(found.rows), len(found.parts), found.left_out) == (60, 60, 0)
    assert 64 < found.rows.lengths.min() <= found.rows.lengths.max() == MOST_TOKENS
    assert (found.rows.label_counts == found.rows.lengths - 1).all()
    assert general_text(ChatTokenizer(EMBEDDED), 2048, 40).rows.lengths.max() == 40
    half = general_text(ChatTokenizer(EMBEDDED), 2048, 512, int(found.rows.lengths.sum()) // 2)  # where time is short
    assert collections.Counter(half.parts) == {"english": 12, "portuguese": 12, "code": 6}

"""Chats are written as they were trained, and answers come in whole characters."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safetrain.core.data.tokenizer import AnswerText, ChatTokenizer, Prompts
from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat, read_prompt_format, write_prompt_format
from tests.conftest import EMBEDDED

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
    write_prompt_format(tmp_path, PromptFormat((1,), "o", "a", "Be brief."))
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

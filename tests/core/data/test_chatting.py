"""Chats are written as they were trained, and answers come in whole characters."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safetrain.core.data.chatting import AnswerText, Prompts
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat, read_prompt_format, write_prompt_format
from tests.conftest import EMBEDDED

TOKENIZER = ChatTokenizer(EMBEDDED)
QUESTION = [{"role": "user", "content": "Iron?"}]


def prompts(opening: str = "", asked: str = "", system: str = "") -> Prompts:
    return Prompts(TOKENIZER, PromptFormat((7,), opening, asked, system))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_an_answer_grows_by_whole_characters_to_what_it_is(text: str) -> None:
    ids = TOKENIZER.encode(text)
    answer, pieces = AnswerText(TOKENIZER), list[str]()
    for number in ids:
        pieces.append(answer.add(number))
        assert answer.text == "".join(pieces)
    pieces.append(answer.rest())
    assert "".join(pieces) == answer.text == TOKENIZER.decode(ids).strip()
    if "\ufffd" not in text:
        assert "\ufffd" not in answer.text


def test_half_a_character_waits_for_its_other_half() -> None:
    ids, answer, cut = TOKENIZER.encode("日"), AnswerText(TOKENIZER), AnswerText(TOKENIZER)
    assert [answer.add(number) for number in ids] == [*([""] * (len(ids) - 1)), "日"]
    assert (len(ids) > 1, cut.add(ids[0]), cut.rest()) == (True, "", "\ufffd")


def test_a_chat_is_opened_as_in_training() -> None:
    usual = prompts().ids(QUESTION)
    assert TOKENIZER.spell(usual) == "<|user|>Iron?<|end|><|assistant|>"
    other = prompts(asked="<|assistant|>", opening="<|system|>").ids(QUESTION)
    assert TOKENIZER.spell(other) == "<|user|>Iron?<|end|><|system|>"
    assert prompts().stop_ids == TOKENIZER.stop_ids | {7}
    assert Prompts(TOKENIZER, None).stop_ids == TOKENIZER.stop_ids


def test_the_system_prompt_of_training_stands_in_front_unless_a_chat_has_its_own() -> None:
    trained = prompts(system="Be brief.")
    with_it = trained.with_system(QUESTION, trained.system)
    assert TOKENIZER.spell(trained.ids(with_it)).startswith("<|system|>Be brief.<|end|><|user|>")
    assert trained.with_system(with_it, "Another.") == with_it
    assert trained.with_system(QUESTION, "") == QUESTION
    assert trained.writes_system("x")


def test_what_was_taught_comes_back_and_a_refusal_of_the_template_is_told(tmp_path: Path) -> None:
    write_prompt_format(tmp_path, PromptFormat((1,), "o", "a", "Be brief."))
    assert read_prompt_format(tmp_path) == PromptFormat((1,), "o", "a", "Be brief.")
    (tmp_path / "chat.json").write_text("[]")
    with pytest.raises(ModelError, match="cannot be read"):
        read_prompt_format(tmp_path)
    with pytest.raises(ModelError, match="unknown role bishop"):
        prompts().ids([{"role": "bishop", "content": "e4"}])


def test_a_model_of_documents_is_given_the_beginning_of_one() -> None:
    prompts = Prompts(TOKENIZER, PromptFormat((7,), "", documents=True))
    asked = prompts.ids([{"role": "user", "content": "The capital of"}])
    assert asked == [TOKENIZER.end_id, *TOKENIZER.encode("The capital of")]
    assert prompts.continues
    assert not prompts.writes_system("Be brief.")

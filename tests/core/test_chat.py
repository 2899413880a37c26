"""What is trained: the answers with their closing token, never the prompt."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from safetrain.core.chat import ask, question, render
from safetrain.core.rows import RowError, parse_row
from safetrain.core.tokenizer import ChatTokenizer
from tests.conftest import EMBEDDED, chat


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(EMBEDDED)


def trained_text(row: Mapping[str, object], tokenizer: ChatTokenizer) -> str:
    rendered = render(parse_row(row), tokenizer)
    ids = [token for token, trained in zip(rendered.ids, rendered.trained, strict=True) if trained]
    return tokenizer._tokenizer.decode(ids)


def test_only_the_answer_and_its_end_are_trained(tokenizer: ChatTokenizer) -> None:
    assert trained_text(chat("What is iron?", "The symbol is Fe."), tokenizer) == "The symbol is Fe.<|end|>"


def test_every_assistant_turn_is_trained(tokenizer: ChatTokenizer) -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    assert trained_text(row, tokenizer) == "one<|end|>two<|end|>"


def test_completions_are_chats(tokenizer: ChatTokenizer) -> None:
    completion = render(parse_row({"prompt": "p", "completion": "c"}), tokenizer)
    assert completion == render(parse_row(chat("p", "c")), tokenizer)


def test_text_is_trained_whole_and_ends(tokenizer: ChatTokenizer) -> None:
    assert trained_text({"text": "Iron is Fe."}, tokenizer) == "Iron is Fe.<|end|>"


def test_the_question_of_a_row_opens_the_answer(tokenizer: ChatTokenizer) -> None:
    row = parse_row(chat("What is iron?", "Fe."))
    asked = question(row, tokenizer)
    assert asked is not None
    assert asked.answer == "Fe."
    assert list(asked.prompt) == ask("What is iron?", tokenizer)
    assert render(row, tokenizer).ids[: len(asked.prompt)] == asked.prompt
    assert question(parse_row({"text": "no question"}), tokenizer) is None


def test_a_turn_that_the_template_renders_differently_later_is_left_out(tmp_path: Path) -> None:
    """Templates that drop earlier thinking: a mask by length would train the wrong tokens there."""
    for file in ("tokenizer.json", "config.json"):
        shutil.copy(EMBEDDED / file, tmp_path / file)
    config = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] if loop.last or m['role'] == 'user' "
        "else 'short') + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = ChatTokenizer(tmp_path)
    turns = [("user", "a"), ("assistant", "a long first answer"), ("user", "b"), ("assistant", "two")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    assert trained_text(row, tokenizer) == "two<|end|>"
    assert render(parse_row(row), tokenizer).untrained_turns == 1


def test_a_refusing_template_is_a_row_error(tokenizer: ChatTokenizer) -> None:
    row = {"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]}
    with pytest.raises(RowError, match="unknown role tool"):
        render(parse_row(row), tokenizer)


def test_a_tokenizer_without_a_template_is_a_row_error(tmp_path: Path) -> None:
    for file in ("tokenizer.json", "config.json"):
        shutil.copy(EMBEDDED / file, tmp_path / file)
    config = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RowError, match="no chat template"):
        render(parse_row(chat("q", "a")), ChatTokenizer(tmp_path))

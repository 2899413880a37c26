"""What is trained: the answers with their closing token, never the prompt."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from safetrain.core.data.chat import Rendered, ask, question, render
from safetrain.core.data.rows import RowError, parse_row
from safetrain.core.data.tokenizer import ChatTokenizer
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


def with_template(folder: Path, template: str | None) -> ChatTokenizer:
    """The embedded tokenizer with another chat template, or none."""
    for file in ("tokenizer.json", "config.json"):
        shutil.copy(EMBEDDED / file, folder / file)
    config = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    return ChatTokenizer(folder)


def template(turn: str, opening: str) -> str:
    opened = f"{{% if add_generation_prompt %}}{{{{ '{opening}' }}}}{{% endif %}}"
    return f"{{% for m in messages %}}{{{{ {turn} }}}}{{% endfor %}}{opened}"


PLAIN = "'<|' + m['role'] + '|>' + m['content'] + '<|end|>'"
TWO_TURNS = {
    "messages": [
        {"role": role, "content": text}
        for role, text in [("user", "a"), ("assistant", "a long first answer"), ("user", "b"), ("assistant", "two")]
    ]
}


def test_a_turn_that_the_template_renders_differently_later_is_left_out(tmp_path: Path) -> None:
    """Templates that drop earlier thinking: a mask by length would train the wrong tokens there."""
    shortened = "(m['content'] if loop.last or m['role'] == 'user' else 'short')"
    tokenizer = with_template(tmp_path, template(f"'<|' + m['role'] + '|>' + {shortened} + '<|end|>'", "<|assistant|>"))
    assert trained_text(TWO_TURNS, tokenizer) == "two<|end|>"
    assert render(parse_row(TWO_TURNS), tokenizer).untrained_turns == 1


def test_an_opening_that_holds_more_than_the_turn_keeps_is_no_hindrance(tmp_path: Path) -> None:
    """Reasoning templates open an answer with <think> and drop it from the rendered turn."""
    tokenizer = with_template(tmp_path, template(PLAIN, "<|assistant|><think>\\n"))
    assert trained_text(TWO_TURNS, tokenizer) == "a long first answer<|end|>two<|end|>"


def test_the_expected_answer_is_what_training_shows(tmp_path: Path) -> None:
    """A template that puts an empty think block into the turn: the tuned model will say it too."""
    turn = (
        "'<|' + m['role'] + '|>' + ('<think></think>' if m['role'] == 'assistant' else '') + m['content'] + '<|end|>'"
    )
    tokenizer = with_template(tmp_path, template(turn, "<|assistant|>"))
    asked = question(parse_row(chat("What is iron?", "Fe.")), tokenizer)
    assert asked is not None
    assert asked.answer == "<think></think>Fe."
    assert asked.answer_tokens == len(tokenizer.encode("<think></think>Fe.<|end|>"))


def test_an_answer_ends_with_what_the_template_closes_turns_with(tmp_path: Path) -> None:
    """A base model's configuration names the end of a text, while its template may close turns with another token."""
    tokenizer = with_template(tmp_path, template("'<|' + m['role'] + '|>' + m['content'] + '<|pad|>'", "<|assistant|>"))
    assert tokenizer.stop_ids == {0, 1}


def test_a_first_assistant_turn_is_left_out_and_later_ones_are_trained(tokenizer: ChatTokenizer) -> None:
    turns = [("assistant", "hello"), ("user", "a"), ("assistant", "one")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    assert trained_text(row, tokenizer) == "one<|end|>"


def test_a_template_that_fails_on_a_row_is_a_row_error(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{% for k, v in messages[0]['content'] | items %}{% endfor %}")
    with pytest.raises(RowError, match="chat template refuses"):
        render(parse_row(chat("q", "a")), tokenizer)


def test_a_refusing_template_is_a_row_error(tokenizer: ChatTokenizer) -> None:
    row = {"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]}
    with pytest.raises(RowError, match="unknown role tool"):
        render(parse_row(row), tokenizer)


def test_a_tokenizer_without_a_template_is_a_row_error(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="no chat template"):
        render(parse_row(chat("q", "a")), with_template(tmp_path, None))


def test_a_cut_row_keeps_a_label() -> None:
    """The end is cut, unless the whole answer is there: then the tokens around its beginning are kept."""
    row = Rendered(tuple(range(100)), (False,) * 60 + (True,) * 40)
    assert row.cut(100) == row
    assert row.cut(80).ids == tuple(range(80))
    short = row.cut(32)
    assert short.ids == tuple(range(44, 76))
    assert short.trained_tokens == 16

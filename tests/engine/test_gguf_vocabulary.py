"""A tokenizer in a GGUF file's terms, and what llama.cpp lacks: refused, because it would split texts otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.data.template import ChatTemplate
from safetrain.core.data.tokenizer import ChatTokenizer, Prompts
from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.engine.exchange.gguf_text import (
    Vocabulary,
    adds_begin,
    stop_ids_of,
    strips_spaces,
    templates_of,
    vocabulary_of,
)
from tests.support.tokenizers_made import STRIPPING_ENDS, TEMPLATE, write_tokenizer

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6


def tokenizer_of(folder: Path, kind: str, **options: Any) -> ChatTokenizer:
    write_tokenizer(folder, kind, **options)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return ChatTokenizer(folder)


def vocabulary(tokenizer: ChatTokenizer, spare: int = 0, *, chats: bool = True) -> Vocabulary:
    return vocabulary_of(tokenizer.definition, tokenizer.size + spare, chats=chats, where="here")


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "dbrx", "qwen2", "smollm"])
def test_llama_cpp_s_name_of_a_split_is_found(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, kind)
    found = vocabulary(tokenizer, 3)
    assert (found.model, found.pre, found.scores) == ("gpt2", kind, ())
    assert found.tokens == (*map(tokenizer.token_of, range(tokenizer.size)), *found.tokens[-3:])
    assert found.types[-3:] == (UNUSED,) * 3
    assert found.types[tokenizer.id_of("<|user|>")] == CONTROL
    left, right = found.merges[0].split(" ")
    assert left + right in found.tokens


@pytest.mark.parametrize(("kind", "chats", "before"), [
    ("llama", True, True), ("gemma", True, False), ("mistral", True, False), ("mistral", False, True),
])  # fmt: skip
def test_letters_are_joined_in_the_order_of_the_merges(kind: str, chats: bool, before: bool, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, kind)
    found = vocabulary(tokenizer, chats=chats)
    assert (found.model, found.merges, found.space_before) == ("llama", (), before)
    assert (found.types.count(BYTE), found.types[0]) == (256, UNKNOWN)
    scores = dict(zip(found.tokens, found.scores, strict=True))
    joined = ["".join(pair) for pair in tokenizer.definition["model"]["merges"]]
    firsts = list(dict.fromkeys(joined))
    assert [scores[piece] for piece in firsts] == sorted((scores[piece] for piece in firsts), reverse=True)


def test_a_split_that_llama_cpp_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"it splits texts by \\w\+\|\\W\+") as caught:
        vocabulary(tokenizer_of(tmp_path, "unknown split"))
    assert "silently answer wrongly" in str(caught.value)


def changed(definition: dict[str, Any], part: str, **values: Any) -> dict[str, Any]:
    return {**definition, part: {**(definition[part] or {}), **values}}


def test_other_kinds_of_tokenizers_are_refused_by_what_they_do(tmp_path: Path) -> None:
    (tmp_path / "bytes").mkdir()
    (tmp_path / "letters").mkdir()
    of_bytes = tokenizer_of(tmp_path / "bytes", "gpt-2").definition
    of_letters = tokenizer_of(tmp_path / "letters", "llama").definition
    vocab = {piece: number for piece, number in of_letters["model"]["vocab"].items() if piece != "<0x0A>"}
    for definition, message in (
        (changed(of_bytes, "model", type="Unigram"), "its model is Unigram"),
        (changed(of_bytes, "model", end_of_word_suffix="</w>"), "prefix or suffix"),
        (changed(of_bytes, "normalizer", type="Lowercase"), "changed before they are split"),
        (changed(of_bytes, "pre_tokenizer", add_prefix_space=True), "it splits texts"),
        (changed(of_bytes, "model", ignore_merges=True), "taking whole words first"),
        (changed(of_letters, "model", vocab=vocab), "pieces for single bytes"),
        ({**of_letters, "normalizer": None}, "texts are changed by nothing"),
    ):
        with pytest.raises(ModelError, match=message):
            vocabulary_of(definition, 700, chats=True, where="here")


def test_tokens_that_drop_white_space_are_found(tmp_path: Path) -> None:
    (tmp_path / "phi").mkdir()
    (tmp_path / "other").mkdir()
    assert strips_spaces(tokenizer_of(tmp_path / "phi", "llama", stripping=STRIPPING_ENDS).definition)
    assert not strips_spaces(tokenizer_of(tmp_path / "other", "llama").definition)


def test_answers_end_where_training_ended_them(tmp_path: Path) -> None:
    """The closing token that was taught is there, and the model's own."""
    tokenizer = tokenizer_of(tmp_path, "llama-bpe")
    end, other = tokenizer.id_of("<|end|>"), tokenizer.id_of("<|system|>")
    assert stop_ids_of(tokenizer, PromptFormat((end, other), ""), tmp_path) == (tokenizer.end_id, end, other)
    assert adds_begin(tokenizer)


def test_no_first_token_is_put_before_chats_that_were_trained_without(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "llama-bpe", template=TEMPLATE.replace("{{ bos_token }}", ""))
    assert tokenizer.encode("a")[0] == tokenizer.id_of("<s>")
    assert not adds_begin(tokenizer)


def test_a_template_s_missing_token_stays_empty_in_programs_that_have_one(tmp_path: Path) -> None:
    templates = templates_of(tokenizer_of(tmp_path, "qwen2"), None)
    assert templates["default"].startswith("{% set bos_token = '' %}")


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "gpt-2", template="")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": None}))
    del tokenizer
    with pytest.raises(ModelError, match="no stop token"):
        stop_ids_of(ChatTokenizer(tmp_path), None, tmp_path)


def test_answers_are_opened_as_in_training(tmp_path: Path) -> None:
    template = TEMPLATE.replace("'<|assistant|>\n' }}{% endif %}", "'<|assistant|>\n<think>' }}{% endif %}")
    tokenizer = tokenizer_of(tmp_path, "llama-bpe", template=template)
    form = PromptFormat((), "Well, ", "<think>")
    source = templates_of(tokenizer, form)["default"]
    written = ChatTemplate({"default": source}, {"bos_token": "<s>"}, tokenizer.template._today)
    question = [{"role": "user", "content": "Why?"}]
    assert written.write(question, prompt=True).endswith("<|assistant|>\nWell, ")
    assert tokenizer.encode_chat(written.write(question, prompt=True)) == Prompts(tokenizer, form).ids(question)
    assert written.write(question) == tokenizer.template.write(question)

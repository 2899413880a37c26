"""A tokenizer in a GGUF file's terms, and what llama.cpp lacks: refused, because it would split texts otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.core.text.tokenizer import ChatTemplate, ChatTokenizer
from safetrain.export.gguf_text import adds_begin, templates_of, write_chat, write_vocabulary
from safetrain.watch.chat import Prompts
from tests.support.tokenizers_made import TEMPLATE, write_tokenizer

CONTROL, UNUSED, BYTE = 3, 5, 6


def tokenizer_of(folder: Path, kind: str, **options: Any) -> ChatTokenizer:
    write_tokenizer(folder, kind, **options)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return ChatTokenizer(folder)


def in_file(writer: GGUFWriter) -> dict[str, Any]:
    """What a file has on its tokenizer."""
    return {key.removeprefix("tokenizer.ggml."): value.value for key, value in writer.kv_data[0].items()}


def vocabulary(tokenizer: ChatTokenizer, spare: int = 0, *, chats: bool = True) -> dict[str, Any]:
    writer = GGUFWriter(None, "llama")
    write_vocabulary(writer, tokenizer.definition, tokenizer.size + spare, chats=chats, where=Path("here"))
    return in_file(writer)


def ends(tokenizer: ChatTokenizer, form: PromptFormat | None = None) -> dict[str, Any]:
    writer = GGUFWriter(None, "llama")
    write_chat(writer, tokenizer, form, tokenizer.size)
    return in_file(writer)


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "dbrx", "qwen2", "smollm"])
def test_llama_cpp_s_name_of_a_split_is_found(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, kind)
    found = vocabulary(tokenizer, 3)
    assert (found["model"], found["pre"], "scores" in found) == ("gpt2", kind, False)
    assert found["tokens"][:-3] == [*map(tokenizer.token_of, range(tokenizer.size))]
    assert found["token_type"][-3:] == [UNUSED] * 3
    assert found["token_type"][tokenizer.id_of("<|user|>")] == CONTROL
    assert found["merges"][0].replace(" ", "") in found["tokens"]


def test_single_bytes_and_the_order_of_merges_are_scores(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "mistral")
    found, outside = (vocabulary(tokenizer, chats=chats) for chats in (True, False))
    assert (found["model"], "merges" in found, found["token_type"].count(BYTE)) == ("llama", False, 256)
    assert (found["add_space_prefix"], outside["add_space_prefix"]) == (False, True)
    scores = dict(zip(found["tokens"], found["scores"], strict=True))
    pieces = list(dict.fromkeys("".join(pair) for pair in tokenizer.definition["model"]["merges"]))
    assert [scores[piece] for piece in pieces] == sorted((scores[piece] for piece in pieces), reverse=True)


def test_other_kinds_of_tokenizers_are_refused_by_what_they_do(tmp_path: Path) -> None:
    for name in ("bytes", "letters", "words"):
        (tmp_path / name).mkdir()
    of_words = tokenizer_of(tmp_path / "words", "unknown split").definition
    of_bytes = tokenizer_of(tmp_path / "bytes", "gpt-2").definition
    of_letters = tokenizer_of(tmp_path / "letters", "llama").definition
    vocab = {piece: number for piece, number in of_letters["model"]["vocab"].items() if piece != "<0x0A>"}

    def changed(definition: dict[str, Any], part: str, **values: Any) -> dict[str, Any]:
        return {**definition, part: {**(definition[part] or {}), **values}}

    for definition, message in (
        (changed(of_bytes, "model", type="Unigram"), "it is Unigram"),
        (changed(of_bytes, "model", end_of_word_suffix="</w>"), "prefixes or suffixes"),
        (changed(of_bytes, "normalizer", type="Lowercase"), "it changes texts before it splits them"),
        (changed(of_bytes, "pre_tokenizer", add_prefix_space=True), "it splits texts"),
        (changed(of_bytes, "model", ignore_merges=True), "splits texts by whole words first, GPT-2"),
        (changed(of_letters, "model", vocab=vocab), "pieces for single bytes"),
        ({**of_letters, "normalizer": None}, "it treats spaces differently"),
        (of_words, r"it splits texts by \\w\+\|\\W\+(?s:.*)silently answer wrongly"),
    ):
        with pytest.raises(ModelError, match=message):
            write_vocabulary(GGUFWriter(None, "llama"), definition, 700, chats=True, where=Path("here"))


def test_answers_end_where_training_ended_them(tmp_path: Path) -> None:
    """The closing token that was taught is there, and the model's own."""
    tokenizer = tokenizer_of(tmp_path, "llama-bpe")
    end, other = tokenizer.id_of("<|end|>"), tokenizer.id_of("<|system|>")
    found = ends(tokenizer, PromptFormat((end, other), ""))
    assert [found[f"{name}_token_id"] for name in ("eos", "eot", "eom")] == [tokenizer.end_id, end, other]
    assert adds_begin(tokenizer)
    write_tokenizer(tmp_path, "llama-bpe", template=TEMPLATE.replace("{{ bos_token }}", ""))
    without = ChatTokenizer(tmp_path)
    assert without.encode("a")[0] == without.id_of("<s>")
    assert not adds_begin(without), "no first token before chats that were trained without"
    write_tokenizer(tmp_path, "qwen2")
    source = templates_of(ChatTokenizer(tmp_path), None)["default"]
    assert source.startswith("{% set bos_token = '' %}"), "a missing token stays empty in programs that have one"
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": None, "chat_template": ""}))
    with pytest.raises(ModelError, match="no stop token"):
        ends(ChatTokenizer(tmp_path))


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

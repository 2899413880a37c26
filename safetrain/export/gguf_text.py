"""Tokenizer and chat template in a GGUF file's metadata.

llama.cpp has a fixed list of ways to split a text (src/llama-vocab.cpp). A tokenizer that splits in another way is
refused, because llama.cpp would silently split texts differently than in training.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.core.text.tokenizer import ChatTokenizer, TemplateError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
START = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
REST, SLASHES = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LINES}", rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}"
LLAMA3 = CONTRACTIONS + rf"|{START}\p{{L}}+|\p{{N}}{{1,3}}" + REST
QWEN2 = CONTRACTIONS + rf"|{START}\p{{L}}+|\p{{N}}" + REST
TEKKEN = f"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*" + r"|\p{N}" + SLASHES
GPT4O = f"{START}{UPPER}*{LOWER}+{CONTRACTIONS}?|{START}{UPPER}+{LOWER}*{CONTRACTIONS}?" + r"|\p{N}{1,3}" + SLASHES
WHOLE, DIGITS, GPT2, BYTES = "whole words first", "single digits", "GPT-2's pattern", "bytes"
SPLITS = {
    (WHOLE, LLAMA3, BYTES): "llama-bpe",
    (LLAMA3, BYTES): "dbrx",
    (QWEN2, BYTES): "qwen2",
    (WHOLE, TEKKEN, BYTES): "tekken",
    (GPT4O, BYTES): "gpt-4o",
    (GPT2,): "gpt-2",
    (DIGITS, GPT2): "smollm",
}
SPACE = "▁"
PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
UNREACHED = -1e6  # the score of a piece that no merge makes


def write_vocabulary(writer: GGUFWriter, definition: Mapping[str, Any], size: int, *, chats: bool, where: Path) -> None:
    """Write the tokenizer that tokenizer.json defines, for an embedding of ``size`` rows.

    ``chats``: whether texts begin with a template's own tokens. Raises ModelError if llama.cpp has no such tokenizer.
    """
    model = definition["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _unknown(f"it is {model['type']}; only BPE without subword prefixes or suffixes is supported", where)
    tokens, types = _pieces(definition, size)
    if not model.get("byte_fallback"):
        writer.add_tokenizer_model("gpt2")  # bytes and merges
        writer.add_tokenizer_pre(_split_name(definition, where))
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    else:
        types = [TokenType.BYTE if BYTE.fullmatch(token) else types[place] for place, token in enumerate(tokens)]
        if types.count(TokenType.BYTE) != 256:
            raise _unknown("it lacks pieces for single bytes", where)
        merges = reversed(list(enumerate(model["merges"])))
        scores = {"".join(pair): -float(rank) for rank, pair in merges}  # the highest for the piece that is made first
        writer.add_tokenizer_model("llama")  # letters, and the pair of the highest score is joined first
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([scores.get(token, UNREACHED) for token in tokens])
        writer.add_add_space_prefix(_space_before(definition, chats=chats, where=where))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    unknown = model["vocab"].get(model.get("unk_token") or "")
    if unknown is not None:
        writer.add_unk_token_id(unknown)


def _pieces(definition: Mapping[str, Any], size: int) -> tuple[list[str], list[TokenType]]:
    """Text and type of each id of the embedding: UNUSED without a token; tokens beyond the embedding are left out."""
    tokens, types = [f"[PAD{number}]" for number in range(size)], [TokenType.UNUSED] * size
    model = definition["model"]
    for token, number in model["vocab"].items():
        if number < size:
            tokens[number], types[number] = token, TokenType.NORMAL
    for added in definition["added_tokens"]:
        text, number = added["content"], added["id"]
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        if SPACE in text and text in model["vocab"]:
            kind = TokenType.NORMAL  # Gemma's runs of spaces: merges make them
        if number < size:
            tokens[number], types[number] = text, TokenType.UNKNOWN if text == model.get("unk_token") else kind
    return tokens, types


def _space_before(definition: Mapping[str, Any], *, chats: bool, where: Path) -> bool:
    """Whether llama.cpp should put a space before a text at the beginning or after a special token."""
    changes, splits = _steps(definition, "normalizer"), _steps(definition, "pre_tokenizer")
    if all(split.get("pattern") == {"String": " "} for split in splits):
        if changes == [REPLACE]:  # as in Gemma
            return False
        if changes == [PREPEND, REPLACE]:  # as in Llama 2
            return True
    if changes or [(split.get("replacement"), split.get("split")) for split in splits] != [(SPACE, False)]:
        raise _unknown("it treats spaces differently from Llama 2, Mistral and Gemma", where)
    scheme = splits[0]["prepend_scheme"]  # as in Mistral
    return scheme == "always" or (scheme == "first" and not chats)


def _split_name(definition: Mapping[str, Any], where: Path) -> str:
    """llama.cpp's name for the way this tokenizer splits texts; raises ModelError if there is none."""
    if changes := [step["type"] for step in _steps(definition, "normalizer") if step["type"] != "NFC"]:
        raise _unknown(f"it changes texts before it splits them ({changes[0]})", where)
    found = [WHOLE] if definition["model"].get("ignore_merges") else []
    for step in _steps(definition, "pre_tokenizer"):
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            found.append(GPT2 if step["use_regex"] else BYTES)
        elif step["type"] == "Digits" and step["individual_digits"]:
            found.append(DIGITS)
        elif step.get("behavior") == "Isolated" and not step["invert"]:
            found.append(str(step["pattern"].get("Regex")))
        else:
            found.append(step["type"])
    if tuple(found) not in SPLITS:
        raise _unknown(f"it splits texts by {', '.join(found) or 'nothing'}", where)
    return SPLITS[tuple(found)]


def _steps(definition: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    """The normalizer or pre_tokenizer, step by step."""
    step = definition.get(part)
    return list(step.get("normalizers") or step.get("pretokenizers") or [step]) if step else []


def _unknown(what: str, where: Path) -> ModelError:
    return ModelError(
        f"llama.cpp does not support this model's tokenizer: {what}.",
        where=where,
        do="keep it as an MLX model (safetrain fuse OUT): with another tokenizer it would silently answer wrongly",
    )


def write_chat(writer: GGUFWriter, tokenizer: ChatTokenizer, form: PromptFormat | None, size: int) -> None:
    """Write the chat template and its special tokens into the metadata. ``size``: rows of the embedding.

    Raises ModelError if there is no stop token: llama.cpp would use an arbitrary one.
    """
    templates = templates_of(tokenizer, form)
    writer.add_chat_template([{"name": name, "template": source} for name, source in templates.items()])
    begin, (end, *others) = tokenizer.special_id("bos"), stop_tokens(tokenizer, form)
    writer.add_bos_token_id(end if begin is None else begin)  # without one, llama.cpp uses token 11
    writer.add_eos_token_id(end)
    known = [number for number in others if number < size]
    for add, number in zip((writer.add_eot_token_id, writer.add_eom_token_id), known, strict=False):
        add(number)
    writer.add_add_bos_token(adds_begin(tokenizer))


def stop_tokens(tokenizer: ChatTokenizer, form: PromptFormat | None) -> list[int]:
    """Tokens that end an answer, the usual one first, then those of the training; ModelError if there is none."""
    trained_ids = form.stop_ids if form else ()
    stops = tokenizer.stop_ids | frozenset(trained_ids)
    if not stops:
        do = "set its eos_token in tokenizer_config.json"
        raise ModelError("This model has no stop token.", where=tokenizer.folder, do=do)
    end = tokenizer.end_id if tokenizer.end_id in stops else min(stops)
    return [end, *(number for number in dict.fromkeys((*trained_ids, *sorted(stops))) if number != end)]


def adds_begin(tokenizer: ChatTokenizer) -> bool:
    """Whether llama.cpp should put the BOS token before texts: if the tokenizer and the chat template do."""
    begin = tokenizer.special_id("bos")
    if begin is None or tokenizer.encode("a")[:1] != [begin]:
        return False
    if not tokenizer.template:
        return True
    with suppress(TemplateError):
        prompt = tokenizer.template.write([{"role": "user", "content": "a"}], prompt=True)
        return prompt.startswith(tokenizer.token_of(begin))
    return False


def templates_of(tokenizer: ChatTokenizer, form: PromptFormat | None) -> dict[str, str]:
    """Jinja templates by name, default and perhaps tool_use, that begin answers as in training."""
    absent = [f"{name}_token" for name in ("bos", "eos") if tokenizer.special_id(name) is None]
    templates = dict[str, str]()
    for name, source in tokenizer.template.sources.items():
        opened = source
        if form is not None and (form.asked or form.opening):
            text = source.removesuffix("\n")  # which Jinja drops at the end of a template, but not in the middle
            asked = form.asked
            cut = f"(chat[:-{len(asked)}] if chat.endswith({asked!r}) else chat)" if asked else "chat"
            answer = f"({cut} + {form.opening!r}) if add_generation_prompt else chat"
            opened = f"{{% set chat %}}{text}{{% endset %}}{{{{ {answer} }}}}"
        empty = (f"{{% set {token} = '' %}}" for token in absent if token in opened)  # a program may insert another
        templates[name] = "".join(empty) + opened
    return templates

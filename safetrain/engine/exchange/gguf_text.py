"""Tokenizer and chat template in a GGUF file, for llama.cpp and Ollama.

llama.cpp has a fixed list of ways to split a text (src/llama-vocab.cpp). A tokenizer with another one is refused,
because llama.cpp would silently split texts differently than in training.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from safetrain.core.data.template import ChatTemplate, TemplateError
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
START = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
REST, SLASHES = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LINES}", rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}"
LLAMA3 = CONTRACTIONS + rf"|{START}\p{{L}}+|\p{{N}}{{1,3}}" + REST
QWEN2 = CONTRACTIONS + rf"|{START}\p{{L}}+|\p{{N}}" + REST
TEKKEN = f"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*" + r"|\p{N}" + SLASHES
GPT4O = f"{START}{UPPER}*{LOWER}+{CONTRACTIONS}?|{START}{UPPER}+{LOWER}*{CONTRACTIONS}?" + r"|\p{N}{1,3}" + SLASHES
GPT2 = "as GPT-2"
DIGITS_GPT2 = "single digits, then as GPT-2"
SPLITS = {  # by the pattern, and whether whole words come before merges
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "dbrx",
    (QWEN2, False): "qwen2",
    (TEKKEN, True): "tekken",
    (GPT4O, False): "gpt-4o",
    (GPT2, False): "gpt-2",
    (DIGITS_GPT2, False): "smollm",
}
SPACE = "▁"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
UNREACHED = -1e6  # the score of a piece that no merge makes
NOT_STRIPPING, PHI_END = {"<unk>", "<s>", "<|endoftext|>"}, "</s>"  # in models named Phi-3
NOT_NFC = "llama.cpp does not normalize texts to Unicode NFC as in training, so it splits some differently"
TWO_SPACES = "llama.cpp adds a second space to a text that begins with one after a special token"
NO_SPACE = "outside a chat, llama.cpp does not begin a text with a space as in training"
MORE_SPACE = "after a special token, llama.cpp begins a text with a space; training did not"
WIDE_SPACES = "llama.cpp keeps wide and other rare spaces after a special token; training drops them"

MARKS = ("zqsystemq", "zqfirstq", "zqansweredq", "zqsecondq", "zqlastq", "zqthirdq")
GO_QUOTES = ("{{", '"""')
NO_TEMPLATE = "# Ollama cannot express this model's chat template: send it prompts that are already rendered (raw).\n"
NO_SYSTEM = "# The system prompt of the training has quotes that a Modelfile cannot hold; use /set system instead\n"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as a GGUF file stores it; ``tokens``, ``types`` and ``scores`` by id."""

    model: str  # gpt2: bytes and merges; llama: letters, and the pair of the highest score is joined first
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    unknown_id: int | None = None
    space_before: bool | None = None  # a space is put before every text that does not follow a text
    strips_after: bool = False  # white space after special tokens is dropped
    notes: tuple[str, ...] = ()  # what llama.cpp does differently in rare texts


@dataclass(frozen=True)
class GgufChat:
    """Chat settings of a GGUF file."""

    templates: Mapping[str, str]  # Jinja, as the training rendered it, by name: default, and perhaps tool_use
    begin: str  # the token that llama.cpp puts before a text; empty: none
    adds_end: bool
    stop_ids: tuple[int, ...]  # every token that ends an answer, the tokenizer's own first


def write_texts(writer: GGUFWriter, vocabulary: Vocabulary, chat: GgufChat, tokenizer: ChatTokenizer) -> None:
    """Write tokenizer and chat settings into a file's metadata."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    writer.add_chat_template([{"name": name, "template": source} for name, source in chat.templates.items()])
    begin, pad = tokenizer.special_id("bos"), tokenizer.special_id("pad")
    size = len(vocabulary.tokens)
    end, *others = chat.stop_ids
    writer.add_bos_token_id(end if begin is None else begin)  # without one, llama.cpp uses token 11
    writer.add_eos_token_id(end)
    others = [number for number in others if number < size]
    for add, number in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
        add(number)
    if pad is not None and pad < size:
        writer.add_pad_token_id(pad)
    if vocabulary.unknown_id is not None:
        writer.add_unk_token_id(vocabulary.unknown_id)
    writer.add_add_bos_token(chat.begin != "")
    writer.add_add_eos_token(chat.adds_end)
    if vocabulary.space_before is not None:
        writer.add_add_space_prefix(vocabulary.space_before)


def vocabulary_of(definition: Mapping[str, Any], size: int, *, chats: bool, where: str) -> Vocabulary:
    """Convert the tokenizer that tokenizer.json defines, for an embedding of ``size`` rows.

    ``chats``: whether texts begin with a template's own tokens. Raises ModelError if llama.cpp has no such tokenizer.
    """
    model = definition["model"]
    if model["type"] != "BPE":
        raise _unknown(f"its model is {model['type']}", "BPE", where)
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _unknown("its pieces have a prefix or suffix", "plain pieces", where)
    tokens, types = _pieces(definition, size)
    merges = [tuple(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"]]
    strips, notes = _stripping(definition)
    unknown = model["vocab"].get(model.get("unk_token") or "")
    if not model.get("byte_fallback"):
        pre, more = _split_name(definition, where)
        joined = tuple(" ".join(pair) for pair in merges)
        return Vocabulary("gpt2", pre, tokens, types, joined, (), unknown, None, strips, notes + more)
    types = tuple(TokenType.BYTE if BYTE.fullmatch(token) else types[place] for place, token in enumerate(tokens))
    if types.count(TokenType.BYTE) != 256:
        raise _unknown("it lacks pieces for single bytes", "256 of them", where)
    before, more = _space_before(definition, chats=chats, where=where)
    ranks: dict[str, int] = {}  # the earlier a piece is merged, the higher its score: llama.cpp joins in their order
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    scores = tuple(-float(ranks[token]) if token in ranks else UNREACHED for token in tokens)
    return Vocabulary("llama", "default", tokens, types, (), scores, unknown, before, strips, notes + more)


def _pieces(definition: Mapping[str, Any], size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Text and type of each id of the embedding: ids without a token are unused, tokens beyond it are left out."""
    tokens, types = [f"[PAD{number}]" for number in range(size)], [int(TokenType.UNUSED)] * size
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
    return tuple(tokens), tuple(map(int, types))


def _space_before(definition: Mapping[str, Any], *, chats: bool, where: str) -> tuple[bool, tuple[str, ...]]:
    """Whether llama.cpp should put a space before texts, and notes on what it still does differently."""
    steps = _flat(definition.get("normalizer"), "normalizers")
    splits = _flat(definition.get("pre_tokenizer"), "pretokenizers")
    kinds, split_kinds = [step["type"] for step in steps], [split["type"] for split in splits]
    replaces = all(
        step["pattern"].get("String") == " " and step["content"] == SPACE for step in steps if step["type"] == "Replace"
    )
    harmless = all(split["type"] == "Split" and split["pattern"].get("String") == " " for split in splits)
    if replaces and harmless and kinds == ["Replace"]:
        return False, ()
    if replaces and harmless and kinds == ["Prepend", "Replace"] and steps[0]["prepend"] == SPACE:
        return True, ()
    if steps or split_kinds != ["Metaspace"] or splits[0]["replacement"] != SPACE:
        got = f"texts are changed by {kinds or 'nothing'}, split by {split_kinds or 'nothing'}"
        raise _unknown(got, f"spaces that become {SPACE}", where)
    if splits[0].get("split", True):
        raise _unknown("it splits at every space", "whole texts", where)
    scheme = splits[0]["prepend_scheme"]
    if scheme == "never":
        return False, ()
    if scheme == "always":
        return True, (TWO_SPACES,)
    return (False, (NO_SPACE,)) if chats else (True, (MORE_SPACE,))


def _split_name(definition: Mapping[str, Any], where: str) -> tuple[str, tuple[str, ...]]:
    """llama.cpp's name for how texts are split, and notes on what it still does differently."""
    normalizer = definition.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _unknown(f"texts are changed before they are split ({normalizer['type']})", "NFC, or nothing", where)
    pattern = _split_pattern(_flat(definition.get("pre_tokenizer"), "pretokenizers"))
    words_first = bool(definition["model"].get("ignore_merges"))
    name = SPLITS.get((pattern, words_first))
    if name is None:
        first = " taking whole words first" if words_first else ""
        raise _unknown(f"it splits texts{first} by {pattern}", "a pattern of llama.cpp's list", where)
    return name, () if normalizer is None else (NOT_NFC,)


def _split_pattern(steps: list[Mapping[str, Any]]) -> str:
    """The pattern that splits texts, its name, or a description if it is not recognised."""
    *before, last = steps or [{"type": "nothing"}]
    if last["type"] == "ByteLevel" and not last["add_prefix_space"]:
        if last["use_regex"] and not before:
            return GPT2
        if last["use_regex"] and [step["type"] for step in before] == ["Digits"] and before[0]["individual_digits"]:
            return DIGITS_GPT2
        isolated = [step for step in before if step.get("behavior") == "Isolated" and not step["invert"]]
        if not last["use_regex"] and len(before) == 1 and isolated:
            return str(before[0]["pattern"].get("Regex"))
    return ", ".join(str(step.get("pattern", step["type"])) for step in steps) or "nothing"


def _flat(step: Mapping[str, Any] | None, inside: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return list(step[inside]) if step["type"] == "Sequence" else [step]


def _stripping(definition: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether special tokens drop white space as in Phi-3, which llama.cpp supports; notes on others that do."""
    added = {token["content"]: token for token in definition["added_tokens"]}
    right = {text for text, token in added.items() if token["rstrip"]}
    as_phi = set(added) >= NOT_STRIPPING and right == set(added) - NOT_STRIPPING and PHI_END in right
    odd = [text for text, token in added.items() if token["lstrip"] or token["single_word"]]
    odd += [] if as_phi else sorted(right)
    notes: tuple[str, ...] = (WIDE_SPACES,) if as_phi else ()
    if odd:
        notes += (f"llama.cpp keeps white space next to {', '.join(odd[:5])}; training drops it",)
    return as_phi, notes


def _unknown(what: str, expected: str, where: str) -> ModelError:
    return ModelError(
        f"llama.cpp does not support this model's tokenizer: {what}.",
        where=where,
        expected=expected,
        do="keep it as an MLX model (safetrain fuse OUT): with another tokenizer it would silently answer wrongly",
    )


def chat_of(tokenizer: ChatTokenizer, form: PromptFormat | None, where: Path) -> GgufChat:
    """Collect the chat settings. Raises ModelError without a stop token: llama.cpp would use an arbitrary one."""
    trained_ids = form.stop_ids if form else ()
    stops = tokenizer.stop_ids | frozenset(trained_ids)
    if not stops:
        raise ModelError(
            "This model has no stop token.", where=str(where), do="set its eos_token in tokenizer_config.json"
        )
    end = tokenizer.end_id if tokenizer.end_id in stops else min(stops)
    bare, with_ends, template = tokenizer.encode_chat("a"), tokenizer.encode("a"), tokenizer.template
    begin = tokenizer.special_id("bos")
    begin_text = "" if begin is None else tokenizer.token_of(begin)
    prompt = ""
    with suppress(TemplateError):
        prompt = template.write(_turns(MARKS[1]), prompt=True) if template else begin_text
    adds_begin = with_ends[:1] == [begin] and bare[:1] != [begin] and prompt.startswith(begin_text)
    adds_end = with_ends[-1:] == [end] and bare[-1:] != [end]
    absent = [f"{name}_token" for name in ("bos", "eos") if tokenizer.special_id(name) is None]
    templates = {}
    for name, source in template.sources.items():
        opened = opened_as_trained(source, form)
        empty = (f"{{% set {token} = '' %}}" for token in absent if token in opened)  # programs may insert another
        templates[name] = "".join(empty) + opened
    order = tuple(dict.fromkeys([end, *trained_ids, *sorted(stops)]))
    return GgufChat(templates, begin_text if adds_begin else "", adds_end, order)


def opened_as_trained(source: str, form: PromptFormat | None) -> str:
    """A Jinja template that begins answers as in training."""
    if form is None or not (form.asked or form.opening):
        return source
    text = source.removesuffix("\n")  # which Jinja drops at the end of a template, but not in the middle
    cut = f"(chat[:-{len(form.asked)}] if chat.endswith({form.asked!r}) else chat)" if form.asked else "chat"
    return (
        f"{{% set chat %}}{text}{{% endset %}}{{{{ ({cut} + {form.opening!r}) if add_generation_prompt else chat }}}}"
    )


def modelfile(file: Path, chat: GgufChat, tokenizer: ChatTokenizer, form: PromptFormat | None) -> str:
    """Text of a Modelfile next to ``file``, for `ollama create`."""
    text, system = ollama_template(tokenizer.template, form, chat.begin), ""
    if form and form.system:  # of all training rows; it must not contain the triple quotes around it
        holds = '"""' not in form.system and not form.system.endswith('"')
        system = f'SYSTEM """{form.system}"""\n' if holds else NO_SYSTEM
    template = f'TEMPLATE """{text}"""\n' if text else NO_TEMPLATE
    stops = (stop.replace("\\", "\\\\").replace('"', '\\"') for stop in map(tokenizer.token_of, chat.stop_ids))
    ends = "".join(f'PARAMETER stop "{stop}"\n' for stop in dict.fromkeys(stops))
    return f"FROM ./{file.name}\n{template}{system}{ends}"


def ollama_template(template: ChatTemplate, form: PromptFormat | None, begin: str) -> str:
    """Write the template in Go, from the text around marks; empty if that would give another text.

    ``begin``: what llama.cpp itself puts before a prompt.
    """
    system, first, answered, second, last, third = MARKS
    try:
        prompt = template.write(_turns(first), prompt=True)
        led = template.write(_turns(first, system=system), prompt=True)
        both = template.write(_turns(first, answered, second), prompt=True)
        long = template.write(_turns(first, answered, second, last, third, system=system), prompt=True)
        before, opening = prompt.split(first)
        lead, after_lead = led.split(first)[0].split(system)
        between = both.split(first)[1].split(answered)[0]
        after = both.split(answered)[1].split(second)[0]
    except (TemplateError, ValueError, IndexError):
        return ""
    expected = lead + system + after_lead + first + between + answered + after + second + between + last + after + third
    if expected + opening != long or any(each in text for text in (prompt, led, both) for each in GO_QUOTES):
        return ""
    answer_opening = (opening.removesuffix(form.asked) + form.opening) if form else opening
    asks = answer_opening if answer_opening == between else (
        f"{{{{ if eq (len (slice $.Messages $i)) 1 }}}}{answer_opening}{{{{ else }}}}{between}{{{{ end }}}}"
    )  # fmt: skip
    before, lead = before.removeprefix(begin), lead.removeprefix(begin)
    head = f"{{{{ if .System }}}}{lead}{{{{ .System }}}}{after_lead}{{{{ else }}}}{before}{{{{ end }}}}"
    user = f'{{{{ if eq .Role "user" }}}}{{{{ if $asked }}}}{after}{{{{ end }}}}{{{{ $asked = true }}}}'
    answer = '{{ else if eq .Role "assistant" }}{{ .Content }}{{ end }}'
    turns = f"{{{{ range $i, $_ := .Messages }}}}{user}{{{{ .Content }}}}{asks}{answer}{{{{ end }}}}"
    return f"{head}{{{{ $asked := false }}}}{turns}"


def _turns(*texts: str, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *turns] if system else turns

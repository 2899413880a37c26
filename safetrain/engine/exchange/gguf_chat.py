"""How a conversation is written for a GGUF file's programs: llama.cpp's Jinja template, Ollama's own, stop tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf

from safetrain.core.data.template import ChatTemplate, TemplateError
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.engine.exchange.gguf_vocabulary import Vocabulary

MARKS = ("zqsystemq", "zqfirstq", "zqansweredq", "zqsecondq", "zqlastq", "zqthirdq")
GO_QUOTES = ("{{", '"""')
NO_TEMPLATE = "# Ollama cannot write this model's chat template: give it prompts that are rendered already (raw).\n"


@dataclass(frozen=True)
class GgufChat:
    """What a file says of conversations."""

    templates: Mapping[str, str]  # Jinja, as the training rendered it, by name: default, and perhaps tool_use
    adds_begin: bool  # llama.cpp puts the first token before a text
    adds_end: bool
    begin: str  # that token
    end_id: int
    stop_ids: tuple[int, ...]  # every token that ends an answer, the one of ``end_id`` first


def chat_of(tokenizer: ChatTokenizer, form: PromptFormat | None, where: Path) -> GgufChat:
    """Raises ModelError where no token ends an answer: llama.cpp would take any for it."""
    stops = tokenizer.stop_ids | frozenset(form.stop_ids if form else ())
    if not stops:
        raise ModelError(
            "No token ends an answer of this model.", where=str(where), do="name its eos_token in tokenizer_config.json"
        )
    end = tokenizer.end_id if tokenizer.end_id in stops else min(stops)
    first = form.stop_ids if form else ()
    order = dict.fromkeys([end, *first, *sorted(stops)])
    bare, with_ends = tokenizer.encode_chat("a"), tokenizer.encode("a")
    begin = tokenizer.special_id("bos")
    begin_text = "" if begin is None else tokenizer.token_of(begin)
    template = tokenizer.template
    writes_begin = not template or (begin_text != "" and _asks(template).startswith(begin_text))
    absent = [name for name in ("bos", "eos") if tokenizer.special_id(name) is None]
    sources = {name: _without(absent, opened_as_trained(source, form)) for name, source in template.sources.items()}
    adds_begin = with_ends[:1] == [begin] and bare[:1] != [begin] and writes_begin
    adds_end = with_ends[-1:] == [end] and bare[-1:] != [end]
    return GgufChat(sources, adds_begin, adds_end, begin_text, end, tuple(order))


def _without(absent: list[str], source: str) -> str:
    """A template for programs that give it a token's text where the tokenizer has no such token."""
    names = [name for name in absent if f"{name}_token" in source]
    return "".join(f"{{% set {name}_token = '' %}}" for name in names) + source


def _asks(template: ChatTemplate) -> str:
    try:
        return template.write([{"role": "user", "content": MARKS[1]}], prompt=True)
    except TemplateError:
        return ""


def opened_as_trained(source: str, form: PromptFormat | None) -> str:
    """A Jinja template that opens answers as the training did."""
    if form is None or not (form.asked or form.opening):
        return source
    text = source.removesuffix("\n")  # which Jinja drops at the end of a template, and not in the middle
    cut = f"(chat[:-{len(form.asked)}] if chat.endswith({form.asked!r}) else chat)" if form.asked else "chat"
    return (
        f"{{% set chat %}}{text}{{% endset %}}{{{{ ({cut} + {form.opening!r}) if add_generation_prompt else chat }}}}"
    )


def write_chat(writer: gguf.GGUFWriter, chat: GgufChat, tokenizer: ChatTokenizer, vocabulary: Vocabulary) -> None:
    """Into a file's head."""
    writer.add_chat_template([{"name": name, "template": source} for name, source in chat.templates.items()])
    begin, pad = tokenizer.special_id("bos"), tokenizer.special_id("pad")
    size = len(vocabulary.tokens)
    writer.add_bos_token_id(chat.end_id if begin is None else begin)  # llama.cpp takes the token 11 where none is named
    writer.add_eos_token_id(chat.end_id)
    others = [number for number in chat.stop_ids if number != chat.end_id and number < size]
    if others:
        writer.add_eot_token_id(others[0])
    if others[1:]:
        writer.add_eom_token_id(others[1])
    if pad is not None and pad < size:
        writer.add_pad_token_id(pad)
    if vocabulary.unknown_id is not None:
        writer.add_unk_token_id(vocabulary.unknown_id)
    writer.add_add_bos_token(chat.adds_begin)
    writer.add_add_eos_token(chat.adds_end)
    if vocabulary.space_before is not None:
        writer.add_add_space_prefix(vocabulary.space_before)


def modelfile(file: Path, chat: GgufChat, tokenizer: ChatTokenizer, form: PromptFormat | None) -> str:
    """For `ollama create`, beside ``file``."""
    stops = dict.fromkeys(tokenizer.token_of(number) for number in chat.stop_ids)
    text = ollama_template(tokenizer.template, form, chat.begin if chat.adds_begin else "")
    system = _system(form.system) if form and form.system else ""
    template = f'TEMPLATE """{text}"""\n' if text else NO_TEMPLATE
    ends = "".join(f"PARAMETER stop {_quoted(stop)}\n" for stop in stops)
    return f"FROM ./{file.name}\n{template}{system}{ends}"


def _system(text: str) -> str:
    """The system prompt of all training rows. Between three quotes, which it cannot have inside."""
    if '"""' in text or text.endswith('"'):
        return "# The system prompt of the training has quotes that a Modelfile cannot hold: set it with /set system\n"
    return f'SYSTEM """{text}"""\n'


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def ollama_template(template: ChatTemplate, form: PromptFormat | None, begin: str) -> str:
    """The template in Go, from what stands around marks; empty where that does not give the same text.

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


def _turns(*texts: str, system: str = "") -> Sequence[dict[str, str]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]

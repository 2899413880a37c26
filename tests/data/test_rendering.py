"""What is trained of a chat, for the ways in which published chat templates and tokenizers differ."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.core.records.adapter_files import PromptFormat
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.data.forms import parse_row
from safetrain.data.rows import RowError
from safetrain.data.tokenize import text_ids
from safetrain.watch.chat import Prompts
from tests.conftest import EMBEDDED
from tests.data.models import Message, model_with, remarks, rendered, renderer, trained, turns
from tests.support.tokenizers_made import TEMPLATE, write_tokenizer

Build = Callable[..., Path]
TURN = "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
THREE = ("Iron?", "It is Fe.", "Gold?", "It is Au.", "Tin?", "It is Sn.")
ENDED = ["It is Fe.<|end|>", "It is Au.<|end|>", "It is Sn.<|end|>"]
CALL: Message = {
    "role": "assistant", "content": None,
    "tool_calls": [{"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
}  # fmt: skip
RESULT: Message = {"role": "tool", "content": "rain", "tool_call_id": "a1", "name": "weather"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def loop(turn: str, after: str = PROMPT, before: str = "") -> str:
    return f"{before}{{% for m in messages %}}{turn}{{% endfor %}}{after}"


@pytest.fixture
def model(tmp_path: Path) -> Build:
    def build(template: str | None, **more: object) -> Path:
        return model_with(tmp_path / "model", template, **more)  # type: ignore[arg-type]

    return build


SYSTEM: Message = {"role": "system", "content": "Be brief."}
THINKING: Message = {"role": "assistant", "content": "It is Fe.", "reasoning_content": "Hm."}
ONE = ("Iron?", "It is Fe.")
NO_THINKING = TURN.replace("m.content", "(m.content.split('</think>')[-1])")
THINK_KEY = (
    "{{ '<|' + m.role + '|>' }}{{ '<think>' + m.thinking + '</think>' if m.thinking }}{{ m.content + '<|end|>' }}"
)
EMPTY_BLOCK = (
    "{{ '<|' + m.role + '|>' }}{% if loop.last and m.role == 'assistant' and '</think>' not in m.content %}"
    "{{ '<think></think>' }}{% endif %}{{ m.content + '<|end|>' }}"
)
PARTS = "{{ '<|' + m.role + '|>' }}{% for p in m.content %}{{ p.text }}{% endfor %}{{ '<|end|>' }}"
ENDS_OTHERWISE = "{% if add_generation_prompt %}<|assistant|>{% else %}<|eot|>{% endif %}"
STOP: dict[str, object] = {"special": ["<|eot|>"]}
WAYS: dict[str, tuple[str | None, dict[str, object], list[Message], list[str], set[str]]] = {
    "contents and their ends": (None, {}, turns(SYSTEM, *THREE), ENDED, set()),
    "closes with nothing: SOLAR, Falcon (W1)": (
        loop("{{ '### ' + m.role + ': ' + m.content + '\\n\\n' }}", "### assistant: "), {"end": "<|eot|>"},
        turns(*ONE), [" It is Fe.<|eot|>"], {"STOP-MISSING"},  # one token with the header's space
    ),
    "closes with what stops nothing": (
        loop(TURN), {"end": "<|eot|>"}, turns(*THREE), [*ENDED[:2], "It is Sn.<|end|><|eot|>"], {"STOP-MISSING"},
    ),
    "a prefix is not a chat: Phi-3, gpt-oss (W2)": (loop(TURN, ENDS_OTHERWISE), STOP, turns(*THREE), ENDED, set()),
    "an empty block in the last turn: Qwen3 (W2b)": (
        loop(EMPTY_BLOCK), {"special": ["<think>", "</think>"]}, turns(*THREE),
        [*ENDED[:2], "<think></think>It is Sn.<|end|>"], {"THINKING-EMPTY"},
    ),
    "inline thinking is dropped (W5)": (
        loop(NO_THINKING), {}, turns("Iron?", "<think>\nHm.\n</think>It is Fe."), ENDED[:1], {"TEXT-LOST"},
    ),
    "thinking in a key is dropped (W5)": (loop(TURN), {}, turns("Iron?", THINKING), ENDED[:1], {"TEXT-LOST"}),
    "thinking is written": (
        loop(THINK_KEY), {}, turns("Iron?", THINKING), ["<think>Hm.</think>It is Fe.<|end|>"], set(),
    ),
    "the prompt always stands: Command-A (W7)": (loop(TURN, "<|assistant|>"), {}, turns(*THREE), ENDED, set()),
    "the system message is left out (W8)": (
        loop("{% if m.role != 'system' %}" + TURN + "{% endif %}"), {}, turns(SYSTEM, *ONE), ENDED[:1], {"TEXT-LOST"},
    ),
    "a stop token is spelled (W13)": (None, {}, turns("What is <|end|>?", "A."), ["A.<|end|>"], {"STOP-IN-TEXT"}),
    "a newline first (W14)": (
        loop("{{ '[' + m.role + ']' + m.content + '<|end|>' }}", "[assistant]"), {}, turns("Iron?", "\n\nIt is Fe."),
        ["\n\nIt is Fe.<|end|>"], set(),
    ),
    "parts are wanted": (loop(PARTS), {}, turns(*THREE), ENDED, set()),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_answers_and_their_ends_are_trained_and_what_is_lost_is_told(way: str, model: Build) -> None:
    template, how, chat, expected, told = WAYS[way]
    folder = model(template, **how) if template else EMBEDDED
    assert (trained(folder, chat), remarks(folder, chat)) == (expected, told)


def test_a_template_that_closes_with_the_next_header_ends_as_its_model_stops(model: Build) -> None:
    """W1, GLM and ChatGLM: the next header is the stop token; the last answer is given one."""
    known = model(loop("{{ '<|' + m.role + '|>' + m.content + '<turn|>' }}"), special=["<turn|>"], end="<|eot|>")
    tokenizer = ChatTokenizer(known)  # W12: special in tokenizer.json alone
    assert tokenizer.stop_ids == {tokenizer.id_of("<turn|>"), tokenizer.id_of("<|eot|>")}
    template = loop("{{ '<|' + m.role + '|>' + m.content }}")
    folder = model(template, end="<|eot|>", config={"eos_token_id": None})
    user = ChatTokenizer(folder).id_of("<|user|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [user]}))
    assert trained(folder, turns(*THREE)) == [f"{text}<|user|>" for text in THREE[1::2]]
    assert remarks(folder, turns(*THREE)) == {"STOP-MISSING"}


def test_a_call_that_the_template_does_not_write_is_an_error_and_no_empty_answer(model: Build) -> None:
    """W3: the label would be: say nothing."""
    chat = turns("Rain?", CALL, RESULT, {"role": "assistant", "content": "Yes."})
    folder = model(loop(TURN))
    assert trained(folder, chat, tools=TOOLS) == ["Yes.<|end|>"]
    assert {"ANSWER-LOST", "TEXT-LOST"} <= remarks(folder, chat, tools=TOOLS)
    assert "ANSWER-LOST" in remarks(folder, chat)


CALLS = loop(
    "{{ '<|' + m.role + '|>' }}{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ARGUMENTS + '</call>' }}{% endfor %}"
    "{{ '<|end|>' }}",
    before="{{ tools | tojson if tools }}",
)


@pytest.mark.parametrize(
    "arguments", ["c.function.arguments | tojson", "c.function.arguments", "c.function.arguments.city"]
)
def test_arguments_are_given_as_the_template_wants_them(model: Build, arguments: str) -> None:
    """W4: text for one that joins it, an object for one that reads it; never JSON in JSON."""
    chat = turns("Rain?", CALL, RESULT, {"role": "assistant", "content": "Yes."})
    folder = model(CALLS.replace("ARGUMENTS", f"({arguments})"), special=["<call>", "</call>"])
    said = "Oslo" if arguments.endswith("city") else '{"city": "Oslo"}'
    expected = [f"<call>weather{said}</call><|end|>", "Yes.<|end|>"]
    if arguments.endswith("city"):
        assert "ANSWER-LOST" in remarks(folder, chat, tools=TOOLS)  # the name of the argument is not written
    else:
        assert not remarks(folder, chat, tools=TOOLS)
    assert trained(folder, chat, tools=TOOLS) == expected
    call = CALL["tool_calls"][0]  # type: ignore[index]
    two: Message = {**CALL, "tool_calls": [call, {**call, "id": "a2"}]}  # and a tool's result at the end
    assert trained(folder, turns("Rain?", two, RESULT), tools=TOOLS) == [
        expected[0].replace("<|end|>", "") + expected[0]
    ]


@pytest.mark.parametrize("arguments", [{}, {"days": 3, "deep": {"on": True}}])
@pytest.mark.parametrize("named", ["", "{{ m.name if m.role == 'tool' }}"])
def test_calls_are_found_where_a_name_is_written_twice(model: Build, arguments: dict[str, object], named: str) -> None:
    """The name of a call stands in its own turn twice, and once more in the header of the tool's answer."""
    template = CALLS.replace("ARGUMENTS", "('=' + c.function.name) + (c.function.arguments | tojson)")
    folder = model(template.replace("'|>' }}", "'|>' }}" + named, 1), special=["<call>", "</call>"])
    call: Message = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}
    chat = turns("Rain?", call, RESULT, {"role": "assistant", "content": "Yes."})
    assert trained(folder, chat, tools=TOOLS) == [
        f"<call>weather=weather{json.dumps(arguments)}</call><|end|>",
        "Yes.<|end|>",
    ]
    assert not remarks(folder, chat, tools=TOOLS)


OPENS_THINKING = "{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"


def test_what_is_asked_is_what_was_trained(model: Build) -> None:
    """W6: the generation prompt opens thinking, the trained turn has none."""
    folder = model(loop(TURN, OPENS_THINKING), special=["<think>", "</think>"])
    chat = turns("Iron?", "It is Fe.")
    assert not remarks(folder, chat)
    row, tokenizer = rendered(folder, chat)
    asked = Prompts(tokenizer, PromptFormat((), row.opening, row.asked)).ids(turns("Iron?"))
    assert tokenizer.decode(asked, special=True) == "<|user|>Iron?<|end|><|assistant|>"
    assert row.text.startswith("<|user|>Iron?<|end|><|assistant|>", 0, row.spans[-1].start)


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_asked_for_may_depend_on_the_chat(model: Build, first: int) -> None:
    """A prompt that opens thinking where a message wants it: the order of the rows decides nothing."""
    opens = "{% if add_generation_prompt %}<|assistant|>{{ '<think>' if '/think' in messages[0].content }}{% endif %}"
    tokenizer = ChatTokenizer(model(loop(TURN, opens), special=["<think>"]))
    writer = renderer(tokenizer)
    chats = [(turns("Iron?", "It is Fe."), ""), (turns("Iron? /think", "It is Fe."), "<think>")]
    for chat, asked in (chats[first], chats[1 - first]):
        row = writer.render(parse_row({"messages": chat}))
        assert row.asked == asked


@pytest.mark.parametrize(
    ("text", "ids"), [("<s>Iron", "<s>Iron<|eot|>"), ("Iron<|end|>\n", "Iron<|end|>\n"), ("Iron<|eot|>", "Iron<|eot|>")]
)
def test_a_text_that_is_templated_already_begins_and_ends_once(model: Build, text: str, ids: str) -> None:
    """W13."""
    folder = model(loop(TURN), end="<|eot|>", begin="<s>")
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.decode(text_ids(text, tokenizer), special=True) == ids


def test_an_assistant_may_speak_first_a_turn_of_weight_0_is_only_read_and_a_developer_is_a_system() -> None:
    wrong: Message = {"role": "assistant", "content": "Wrong.", "weight": 0}
    chat: list[Message] = [{"role": "assistant", "content": "Hello."}, *turns("Iron?", wrong, "Iron?", "It is Fe.")]
    assert trained(EMBEDDED, chat) == ["Hello.<|end|>", "It is Fe.<|end|>"]
    row, _ = rendered(EMBEDDED, turns({"role": "developer", "content": "Be brief."}, "Iron?", "It is Fe."))
    assert (row.text.startswith("<|system|>Be brief."), row.remarks) == (True, ())


def test_what_the_sandbox_forbids_is_not_the_data_s_fault(model: Build) -> None:
    folder = model(loop(TURN, before="{% set seen = [] %}{% set _ = seen.append(1) %}"))
    assert remarks(folder, turns("Iron?", "It is Fe.")) == {"TEMPLATE-REFUSES"}
    assert remarks(model("{% for m in messages %}"), turns("Iron?", "It is Fe.")) == {"TEMPLATE-REFUSES"}
    assert remarks(model_with(folder.parent / "bare", None), turns("Iron?", "It is Fe.")) == {"TEMPLATE-REFUSES"}
    needs = model(loop(TURN, before="{% for t in tools %}{{ t.function.name }}{% endfor %}"))  # W11
    assert remarks(needs, turns("Iron?", "It is Fe.")) == {"TEMPLATE-REFUSES"}
    assert trained(needs, turns("Iron?", "It is Fe."), tools=TOOLS) == ENDED[:1]
    changing = model(loop("{{ '<|' + m.role + '|>' + (m.content | upper) + '<|end|>' }}"))
    assert remarks(changing, turns("Iron?", "It is Fe.")) == {"TEMPLATE-REFUSES"}


def test_a_template_beside_a_processor_and_named_ones_are_read(model: Build, tmp_path: Path) -> None:
    folder = model(None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": loop(TURN)}))
    assert trained(folder, turns("Iron?", "It is Fe.")) == ["It is Fe.<|end|>"]
    named = model_with(tmp_path / "named", None)
    names = json.loads((named / "tokenizer_config.json").read_text())
    with_tools = loop(TURN, before="{{ tools | tojson }}")
    listed = [{"name": "default", "template": loop(TURN)}, {"name": "tool_use", "template": with_tools}]
    (named / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": listed}))
    assert not remarks(named, turns("Iron?", "It is Fe."), tools=TOOLS)


ANSWER: Message = {"role": "assistant", "content": "a"}
USER: Message = {"role": "user", "content": "q"}


@pytest.mark.parametrize(("chat", "hint"), [
    ([SYSTEM, USER, ANSWER], " (perhaps because of its system message)"),
    ([USER, CALL, RESULT, ANSWER], " (perhaps because of its tool calls)"),
    ([USER, USER, ANSWER], ""),
])  # fmt: skip
def test_a_refusal_has_the_template_s_own_words(model: Build, chat: list[Message], hint: str) -> None:
    """They are often about something else, so what the row has is named with them."""
    folder = model(loop(TURN, before="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(RowError) as caught:
        rendered(folder, chat)
    assert (caught.value.id, str(caught.value)) == ("TEMPLATE-REFUSES", f"roles must alternate{hint}")


LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CHAT = turns("Is ﬁron 🙂?", "É Fe 🙂 铁.", "Gold", "Au, é isso")


@pytest.mark.parametrize("template", [LLAMA_2, TEMPLATE.replace("<|end|>\n", "</s>")])
@pytest.mark.parametrize("kind", ["llama", "other letters"])
def test_the_answers_and_their_ends_are_trained(kind: str, template: str, tmp_path: Path) -> None:
    """With a mark for every space, single bytes, and letters that the tokenizer changes."""
    write_tokenizer(tmp_path, kind, template=template)
    (tmp_path / "config.json").write_text("{}")
    space = " " if template == LLAMA_2 else ""
    assert [text.strip() for text in trained(tmp_path, CHAT)] == [f"É Fe 🙂 铁.{space}</s>", f"Au, é isso{space}</s>"]
    found = ChatTokenizer(tmp_path)
    text = renderer(found).render(parse_row({"messages": CHAT})).text
    (encoding,) = found.encode_chats([text])
    assert encoding.ids == found.encode_chat(text)

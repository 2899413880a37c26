"""Calls are read back from what a template writes, in the styles of four families; what is read otherwise is told."""

from pathlib import Path
from typing import Any

import pytest

from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.data.forms import parse_row
from safetrain.data.render import Renderer
from safetrain.engine.upstream.tool_calls import ToolCalls
from tests.conftest import ROOT

ROLE = "<|{{ 'user' if message.role == 'tool' else message.role }}|>"
HEAD = "{% for message in messages %}" + ROLE + "{{ message.content or '' }}"
TAIL = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
EACH = "{% for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}"
ITEMS = "{% for key, value in tool_call.arguments.items() %}"
NAME, JSON, END = "{{ tool_call.name }}", "{{ tool_call.arguments | tojson }}", "{% endfor %}"
COMMA = "{{ ', ' if not loop.first }}"
STYLES = {
    "json": EACH + '<tool_call>{"name": "' + NAME + '", "arguments": ' + JSON + "}</tool_call>" + END,
    "xml": EACH + "<tool_call>\n<function=" + NAME + ">\n" + ITEMS + "<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n" + END + "</function>\n</tool_call>" + END,
    "mistral": EACH + "[TOOL_CALLS]" + NAME + "[ARGS]" + JSON + END,
    "python": "{% if message.tool_calls %}<|tool_call_start|>[" + EACH + COMMA + NAME + "(" + ITEMS + COMMA
    + "{{ key }}={{ value | tojson }}" + END + ")" + END + "]<|tool_call_end|>{% endif %}",
}  # fmt: skip
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "where": {"type": "object"},
    "tags": {"type": "array"},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
         for name in ("weather", "ping")]  # fmt: skip
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "plain": [("weather", {"city": "Porto", "days": 2})],
    "nested": [("weather", {"where": {"at": {"x": 1.5, "y": None}, "is": True}, "tags": ["a", "b c"]})],
    "unicode": [("weather", {"city": 'São Paulo "東京" {x}'})],
    "empty": [("ping", {})],
    "two": [("weather", {"city": "Rio"}), ("weather", {"city": "Oslo"})],
    "none": [],
}


def model_with(template: str, folder: Path) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_bytes((ROOT / "models/encyclopedia-3m" / name).read_bytes())
    (folder / "chat_template.jinja").write_text(HEAD + template + TAIL)
    return folder


def answer_in(folder: Path, calls: list[tuple[str, dict[str, Any]]]) -> tuple[dict[str, Any], str]:
    """A row whose answer calls these tools, and that answer as the model would write it."""
    written = [{"type": "function", "function": {"name": name, "arguments": each}} for name, each in calls]
    turn = {"role": "assistant", "content": "" if calls else "Sunny.", **({"tool_calls": written} if calls else {})}
    row = parse_row({"messages": [{"role": "user", "content": "?"}, turn], "tools": TOOLS})
    tokenizer = ChatTokenizer(folder)
    rendered = Renderer(tokenizer.template, tokenizer.controls, tokenizer.end_token).render(row)
    span = rendered.spans[rendered.judged]
    ids = tokenizer.encode_chat(rendered.text[span.start : span.end])
    return row.as_json(), tokenizer.decode(ids, special=True)


@pytest.mark.parametrize("style", STYLES)
def test_what_a_template_writes_is_read_as_it_was(style: str, tmp_path: Path) -> None:
    folder = model_with(STYLES[style], tmp_path / "model")
    reader = ToolCalls(folder)
    for name, calls in CASES.items():
        row, text = answer_in(folder, calls)
        assert reader.unread([(row, text)]) == "", name
        assert [(call["name"], call["arguments"]) for call in reader.read(text, TOOLS)[0]] == calls


def test_a_template_that_loses_something_is_told(tmp_path: Path) -> None:
    """Python's None in JSON, a number as a text, and calls that no parser knows."""
    printed = "{{ tool_call.arguments | string | replace(\"'\", '\"') }}"
    for number, (template, case, says) in enumerate([
        (STYLES["json"].replace(JSON, printed), "nested", "parser refuses"),
        (STYLES["xml"], "plain", "is read as"),
        ("{{ message.tool_calls | string }}", "plain", "has no parser"),
    ]):  # fmt: skip
        folder = model_with(template, tmp_path / str(number))
        row, text = answer_in(folder, CASES[case])
        without_types = {**row, "tools": [{"type": "function", "function": {"name": "weather"}}]}
        assert says in ToolCalls(folder).unread([(without_types, text)])

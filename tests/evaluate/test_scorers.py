"""One answer, from 0 to 1: JSON by its fields, calls by structure, and programs of the user's that misbehave."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.errors import ConfigError, DataError
from safetrain.evaluate.scorers import Checker, json_scorer, judge_text, tools_scorer
from tests.conftest import ROOT

DUE = {"name": "Ana", "age": 30, "address": {"city": "Porto", "tags": ["a", "b"]}}


@pytest.mark.parametrize(
    ("answer", "score", "note"),
    [
        ('{"age": 30.0, "address": {"tags": ["a", "b"], "city": "Porto"}, "name": "Ana"}', 1.0, ""),
        ('{"name": "Ana", "age": "30", "address": {"city": "Porto", "tags": ["b", "a"]}}', 0.5, "wrong: address.tags"),
        (json.dumps({**DUE, "zip": 1}), 0.8, "wrong: zip"),
        ('{"name": true}', 0.0, "wrong: address.city"),
        ("Here it is: {}", 0.0, "not JSON"),
        ('{"name": NaN}', 0.0, "not JSON"),
        ("[" * 100_000, 0.0, "not JSON"),
        ("", 0.0, "not JSON"),
    ],
)  # fmt: skip
def test_json_is_scored_by_its_fields(answer: str, score: float, note: str) -> None:
    found = json_scorer(None)({}, json.dumps(DUE), answer)
    assert (found.score, found.note) == (pytest.approx(score), note)
    assert found.parts["exact"] == (score == 1.0)
    assert set(found.parts) >= {"is_json", "field address.city", "field age"}


def test_a_schema_refuses_answers_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}')
    judge = json_scorer(schema)
    assert judge({}, '{"age": 3}', '{"age": 3}').score == 1.0
    assert judge({}, '{"age": 3}', '{"ages": 3}').note == "refused by the schema"
    schema.write_text('{"$ref": "#/nowhere"}')
    with pytest.raises(ConfigError, match=r"(?s)nowhere.*correct that \$ref"):
        json_scorer(schema)({}, '{"age": 3}', '{"age": 3}')
    for text in ("{", '{"type": "objekt"}', "3"):
        schema.write_text(text)
        with pytest.raises(ConfigError, match="is not a JSON schema"):
            json_scorer(schema)


CALL = {"name": "weather", "arguments": {"city": "Porto", "days": 2}}


def called(*calls: dict[str, Any]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """mlx-lm's parser for the template of Qwen2.5 and Qwen3."""
    from safetrain.engine.upstream.tool_calls import ToolCalls

    folder = ROOT / "models/encyclopedia-3m"
    copy = tmp_path_factory.mktemp("qwen")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (copy / name).write_bytes((folder / name).read_bytes())
    (copy / "chat_template.jinja").write_text(
        "{% for tool_call in messages %}<tool_call>{{ tool_call.name }}{% endfor %}"
    )
    return ToolCalls(copy)


@pytest.mark.parametrize(
    ("due", "answer", "mistake"),
    [
        ([CALL], called(CALL), ""),
        ([CALL], called({"name": "weather", "arguments": {"days": 2.0, "city": "Porto"}}), ""),
        ([CALL], called({**CALL, "name": "climate"}), "wrong name"),
        ([CALL], called({"name": "weather", "arguments": {"city": "Porto", "days": "2"}}), "wrong argument"),
        ([CALL], called({"name": "weather", "arguments": {"city": "Porto"}}), "wrong argument"),
        ([CALL], called(CALL, CALL), "extra call"),
        ([CALL, CALL], called(CALL), "missing call"),
        ([CALL], "It is sunny.", "text for a call"),
        ([CALL], "<tool_call>\n{nonsense\n</tool_call>", "unreadable call"),
        ([CALL], '<tool_call>\n{"arguments": 3}\n</tool_call>', "unreadable call"),
        ([CALL], f"Let me look. {called(CALL)}", ""),
        ([], called(CALL), "call for a text"),
        ([], "It is sunny.", ""),
        ([], " ", "empty answer"),
    ],
)
def test_each_wrong_call_is_told_as_what_it_is(due: list[Any], answer: str, mistake: str, reader: Any) -> None:
    calls = [{"type": "function", "function": call} for call in due]
    turn = {"role": "assistant", "content": "" if due else "Sunny.", "tool_calls": calls}
    found = tools_scorer(reader)({"messages": [{"role": "user", "content": "?"}, turn], "tools": []}, "", answer)
    assert (found.score, found.note) == (float(not mistake), mistake)
    names = float(mistake in ("", "wrong argument"))
    assert found.parts == ({"names": names, "calls": found.score} if due else {"no_call": found.score})


def test_calls_that_are_read_back_otherwise_are_not_scored(reader: Any) -> None:
    row = {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]}]}
    assert reader.unread([(row, called(CALL))]) == ""
    assert "is read as" in reader.unread([(row, called({**CALL, "arguments": {}}))])
    assert "refuses" in reader.unread([(row, "<tool_call>x</tool_call>")])
    assert "has no parser" in type(reader)(ROOT / "models/encyclopedia-3m").unread([(row, called(CALL))])


ROW = {"prompt": "2 + 2?", "completion": "It is 4."}
LOOP = "import json, sys\nfor line in sys.stdin:\n    got = json.loads(line)\n"


def checker(folder: Path, body: str, seconds: float = 5.0) -> Checker:
    path = folder / "check.py"
    path.write_text(body)
    return Checker(path, seconds)


@pytest.mark.parametrize(
    ("line", "score", "note"),
    [("1", 1.0, ""), ("0.25", 0.25, ""), ("true", 1.0, ""), ('{"score": 0.5, "note": "nearly"}', 0.5, "nearly")],
)
def test_a_program_gets_row_and_answer_and_its_score_counts(line: str, score: float, note: str, tmp_path: Path) -> None:
    body = f"{LOOP}    assert got == {{'row': {ROW!r}, 'answer': 'é\\n4'}}\n    print({line!r}, flush=True)\n"
    with checker(tmp_path, body) as judge:
        for _ in range(2):  # one process for all
            found = judge(ROW, "", "é\n4")
            assert (found.score, found.note) == (score, note)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (f"{LOOP}    import time; time.sleep(60)\n", "did not answer within 1 s"),
        ("import time; time.sleep(60)\n", "did not answer within 1 s"),  # reads nothing
        (f"{LOOP}    raise ValueError('no such row')\n", "ended (exit code 1)"),
        ("import os; os.kill(os.getpid(), 9)\n", "ended (killed by signal 9)"),
        ("x = (\n", "ended (exit code 1)"),
        (f"{LOOP}    print('good', flush=True)\n", "wrote no score"),
        (f"{LOOP}    print(2, flush=True)\n", "wrote no score"),
        (f"{LOOP}    print('NaN', flush=True)\n", "wrote no score"),
        (f"{LOOP}    print('{{}}', flush=True)\n", "wrote no score"),
        (f"{LOOP}    print('1\\n1', flush=True)\n", "wrote more than one line"),
        ("while True:\n    print('x' * 2**20, end='')\n", "wrote over"),
    ],
)
def test_a_program_that_misbehaves_is_an_error_with_the_row(
    body: str, what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with checker(tmp_path, body, 1.0) as judge, pytest.raises(DataError) as failed:
        judge({**ROW, "long": "x" * 300_000}, "", "4")
    assert f"The checker {what}" in str(failed.value)
    assert "2 + 2?" in str(failed.value)
    if "no such row" in body:
        assert "ValueError: no such row" in capfd.readouterr().err


def test_a_program_that_cannot_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "check").write_text("#!/bin/nothing")
    with pytest.raises(ConfigError, match="cannot be run"):
        Checker(tmp_path / "check")
    (tmp_path / "check").write_text("#!/bin/sh\nread line; echo 1\n")
    (tmp_path / "check").chmod(0o755)
    with Checker(tmp_path / "check") as judge:
        assert judge(ROW, "", "4").score == 1.0


@pytest.mark.parametrize(
    ("name", "row", "answers"),
    [
        ("last_number.py", ROW, {"It is 4.": 1, "4": 1, "2 and 2 make 5": 0, "no": 0, "4.0": 1}),
        ("compiles.py", {"prompt": "?"}, {"x = 1": 1, "```python\nx = 1\n```": 1, "x = ": 0, "": 0, "'a\\d'": 1}),
    ],
)
def test_the_shipped_programs_score(name: str, row: dict[str, Any], answers: dict[str, float]) -> None:
    with Checker(ROOT / "conf/score" / name) as judge:
        assert {answer: judge(row, "", answer).score for answer in answers} == answers


def test_text_is_exact_or_not() -> None:
    assert judge_text({}, "Au.", "Au.").score == 1.0
    found = judge_text({}, "It is gold", "gold it is")
    assert (found.score, found.parts["token_f1"]) == (0.0, 1.0)


def test_thinking_is_cut_before_an_answer_is_judged(thinking: Callable[..., Any]) -> None:
    after, ids = thinking()
    assert after(ids("<think>2 and 2</think>It is 4.")) == ids("It is 4.")
    assert after(ids("<think>a</think>b</think>c")) == ids("c")
    assert after(ids("It is 4.")) == ids("It is 4.")
    assert after(ids("<think>2 and 2 and"), ()) is None
    assert after(ids("2 and 2"), ids("2</think>4")) is None, "the prompt has begun the thinking"
    assert after(ids("4"), ids("<think>2</think>4")) == ids("4"), "it may answer at once"


@pytest.fixture
def thinking(tmp_path: Path) -> Callable[..., Any]:
    from safetrain.core.text.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(ROOT / "models/encyclopedia-3m")
    return lambda: (tokenizer.after_thinking, tokenizer.encode_chat)

"""One row of each public data set that people train on: what it becomes, or what is said of it."""

import json

import pytest

from safetrain.data.forms import named_columns, parse_row
from safetrain.data.json_rows import RowError
from tests.data.reading import settings_in
from tests.data.test_rows import parsed

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
SYSTEM_TURN = {"from": "system", "value": "s"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
CHAT, PAIR = {"messages": [USER, ASSISTANT]}, {"prompt": "q", "completion": "a"}
FLAT_TOOL = {"name": "f", "description": "d", "parameters": {"city": {"type": "str"}}}
TOOL = {"type": "function", "function": FLAT_TOOL}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Lisbon"}}}
SUNNY = {"role": "tool", "content": "t"}
CALLED = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, SUNNY, ASSISTANT]
AS_TEXT = '{"name": "f", "arguments": {"city": "Lisbon"}}'
RENDERED = "Below is an instruction.\n\n### Instruction:\nq\n\n### Input:\ni\n\n### Response:\na"

READ = {
    "tatsu-lab/alpaca": (
        {"instruction": "q", "input": "i", "output": "a", "text": RENDERED},
        {"prompt": "q\n\ni", "completion": "a"},
    ),
    "alpaca of LLaMA-Factory": (
        {"instruction": "q", "input": "", "output": "a", "system": "s", "history": [["q", "a"]]},
        {"messages": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]},
    ),
    "databricks/databricks-dolly-15k": (
        {"instruction": "q", "context": "c", "response": "a", "category": "closed_qa"},
        {"prompt": "q\n\nc", "completion": "a"},
    ),
    "HuggingFaceH4/ultrachat_200k": ({"prompt": "q", "prompt_id": "f0", **CHAT}, CHAT),
    "HuggingFaceH4/no_robots": (
        {"prompt": "s", "prompt_id": "2d", "messages": [SYSTEM, USER, ASSISTANT], "category": "Chat"},
        {"messages": [SYSTEM, USER, ASSISTANT]},
    ),
    "ShareGPT": ({"id": "x_0", "conversations": [HUMAN, GPT]}, CHAT),
    "Open-Orca/OpenOrca": (
        {"id": "niv.1", "system_prompt": "s", "question": "q", "response": "a"},
        {"system": "s", **PAIR},
    ),
    "Open-Orca/SlimOrca": (
        {"conversations": [{**SYSTEM_TURN, "weight": None}, {**HUMAN, "weight": 0.0}, {**GPT, "weight": 1.0}]},
        {"messages": [SYSTEM, USER, ASSISTANT]},
    ),
    "meta-math/MetaMathQA": ({"type": "T", "query": "q", "original_question": "other", "response": "a"}, PAIR),
    "open-r1/OpenR1-Math-220k": (
        {"problem": "q", "solution": "by hand", "answer": "a", "source": "olympiads", "generations": ["a"], **CHAT},
        CHAT,
    ),
    "timdettmers/openassistant-guanaco": ({"text": "### Human: q### Assistant: a"},) * 2,
    "llamafactory/glaive_toolcall_en": (
        {
            "conversations": [
                HUMAN, {"from": "function_call", "value": AS_TEXT}, {"from": "observation", "value": "t"}, GPT,
            ],
            "tools": json.dumps([FLAT_TOOL]),
        },
        {"messages": CALLED, "tools": [TOOL]},
    ),
    "NousResearch/hermes-function-calling-v1": (
        {
            "id": "8f", "conversations": [SYSTEM_TURN, HUMAN, GPT, {"from": "tool", "value": "t"}, GPT],
            "tools": json.dumps([TOOL]), "category": "IoT", "subcategory": "Cameras", "task": "Camera",
        },
        {
            "messages": [SYSTEM, USER, ASSISTANT, SUNNY, ASSISTANT],
            "tools": [TOOL],
        },
    ),
    "OpenAI's, with weights": (
        {"messages": [USER, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "weight": 1}]},
        {"messages": [USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT]},
    ),
    "OpenAI's, with tools": (
        {
            "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, SUNNY, ASSISTANT],
            "parallel_tool_calls": False, "tools": [TOOL],
        },
        {"messages": CALLED, "tools": [TOOL]},
    ),
    "OpenAI's, before tools": (
        {
            "messages": [
                USER, {"role": "assistant", "content": None, "function_call": json.loads(AS_TEXT)},
                {"role": "function", "content": "t"}, ASSISTANT,
            ],
            "functions": [FLAT_TOOL],
        },
        {"messages": CALLED, "tools": [TOOL]},
    ),
    "lmsys/lmsys-chat-1m": (
        {"conversation_id": "c", "model": "m", "conversation": [USER, ASSISTANT], "openai_moderation": [{}]},
        CHAT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_a_row_of_a_public_set_becomes(name: str) -> None:
    value, row = READ[name]
    assert parsed(value).as_json() == row


REFUSED = {
    "nvidia/Llama-Nemotron-Post-Training": (
        {"input": [USER], "output": "a", "category": "math", "system_prompt": "s"},
        "read in two ways",
        ["messages: input, system: system_prompt", "prompt: input, completion: output"],
    ),
    "Salesforce/xlam-function-calling-60k": (
        {"id": 0, "query": "q", "answers": f"[{AS_TEXT}]", "tools": json.dumps([FLAT_TOOL])},
        "unknown keys (id, query, answers, tools)",
        ["prompt: query, completion: answers"],
    ),
    "OpenAssistant/oasst1": (
        {"text": "q", "role": "prompter", "labels": {"name": ["spam"]}}, "labels: classes and KTO marks", [],
    ),
    "trl-lib/kto-mix-14k": ({"prompt": [USER], "completion": [ASSISTANT], "label": False}, "keep the good rows", []),
    "Anthropic/hh-rlhf": ({"chosen": "a", "rejected": "b"}, "preference data is not supported", ["text: chosen"]),
    "HuggingFaceH4/ultrafeedback_binarized": (
        {"prompt": "q", "chosen": [USER, ASSISTANT], "rejected": [USER], **CHAT}, "on the chosen answers",
        ["messages: chosen"],
    ),
    "OpenAI's preferences": (
        {"input": CHAT, "preferred_output": [ASSISTANT], "non_preferred_output": [USER]}, "preferred_output: ", [],
    ),
    "Gemini's": (
        {"contents": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "a"}]}]},
        "unknown keys (contents)", [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_said_of_a_set_that_cannot_be_read_as_it_is(name: str) -> None:
    value, says, columns = REFUSED[name]
    with pytest.raises(RowError) as caught:
        parse_row(value)
    assert says in str(caught.value)
    assert settings_in(caught.value) == [f"{{{way}}}" for way in columns]
    for way in columns if "chosen" in str(value) else ():  # the printed setting reads the row
        parse_row(value, named_columns(part.replace(": ", "=") for part in way.split(", ")))

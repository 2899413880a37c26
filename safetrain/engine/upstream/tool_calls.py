"""Reads the calls of tools in an answer, with mlx-lm's parser for the model's chat template.

``python -m safetrain.engine.upstream.tool_calls MODEL`` says whether the calls of the validation rows can be read back.
"""

import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load

from safetrain.core.data.store import Call, Canonical, calls_due, canonical_rows, open_split, same_calls
from safetrain.core.errors import ModelError
from safetrain.core.foreign import told
from safetrain.core.text.tokenizer import FETCH, PYTHON_ERRORS, ChatTokenizer

TRIED = 100  # rows whose calls are read back
NO_PARSER = "mlx-lm has no parser for the calls of this chat template"


class ToolCalls:
    """The calls in answers of one model, whose parser is loaded when it is needed."""

    def __init__(self, model: Path) -> None:
        self._model = model

    @functools.cached_property
    def _parser(self) -> Any:
        with told("The model's tokenizer cannot be loaded", self._model, FETCH):
            return load(self._model)

    def read(self, text: str, tools: object) -> tuple[list[Call], str]:
        """The calls in an answer with its control tokens, and the text around them. Raises ValueError for nonsense."""
        calls, plain, rest, parser = list[Call](), "", text, self._parser
        while parser.tool_call_start in rest:
            before, _, rest = rest.partition(parser.tool_call_start)
            inner, _, rest = rest.partition(parser.tool_call_end) if parser.tool_call_end else (rest, "", "")
            try:
                found = parser.tool_parser(inner, tools)
                calls += [{"name": each["name"], "arguments": _json(each.get("arguments"))} for each in _listed(found)]
            except (*PYTHON_ERRORS, SyntaxError) as error:
                raise ValueError(f"not a call: {error}") from error
            plain += before
        return calls, plain + rest

    def unread(self, asked: Iterable[tuple[Canonical, str]]) -> str:
        """Why the calls of these rows and answers cannot be scored; empty if all are read as they were written."""
        for row, text in asked:
            if not self._parser.tool_parser:
                return NO_PARSER
            due = calls_due(row)
            shown = json.dumps(due, ensure_ascii=False)
            try:
                found = self.read(text, row.get("tools"))[0]
            except ValueError as error:
                return f"mlx-lm's parser refuses {shown}: {error}"
            if not same_calls(found, due):
                return f"{shown} is read as {json.dumps(found, ensure_ascii=False)}"
        return ""


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _json(arguments: object) -> object:
    """Arguments as an object: some parsers return JSON text."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def main(model: str) -> None:
    """Print why the calls of the validation rows cannot be scored, as JSON; empty if they can, or there are none."""
    store, tokenizer, rows = open_split("valid", Path(model)), ChatTokenizer(Path(model)), list(canonical_rows("valid"))
    asked = list[tuple[Canonical, str]]()
    for number in range(min(TRIED, len(store.question_rows))):
        question = store.question(number)
        row = rows[store.line(question.row)]
        asked += [(row, tokenizer.decode(question.answer, special=True))] if calls_due(row) else []
    try:
        refusal = ToolCalls(Path(model)).unread(asked)
    except ModelError as error:
        refusal = str(error)
    print(json.dumps({"refusal": refusal}))


if __name__ == "__main__":
    main(sys.argv[1])

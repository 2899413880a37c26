"""Where no row can be read, and all for one reason, the remedy is that reason's own."""

import json
from pathlib import Path

import pytest

from safetrain.core.errors import DataError
from safetrain.plan.repair import repair
from safetrain.plan.validate import Decided, validate_files
from tests.conftest import EMBEDDED

LABELLED = ['{"text": "It rains all day.", "label": "bad"}', '{"text": "The sun is out.", "label": "good"}']


def remedies(tmp_path: Path, lines: list[str], decided: Decided = Decided()) -> list[str]:  # noqa: B008 frozen
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = validate_files([data], EMBEDDED, 0, decided).findings
    return [item.remedy for item in found if item.id == "ROW-UNREADABLE"]


@pytest.mark.parametrize(
    ("lines", "remedy"),
    [
        (LABELLED, "safetrain validate FILE --columns prompt=text --columns completion=label"),
        (['["a", "b"]', '["c", "d"]'], "write each row as {"),
        (['{"answer": "b"} {"answer": "c"}'], "one JSON object on each line"),
        (['{"prompt": "a", "images": ["b.png"], "completion": "c"}'] * 2, "make another file: jq -c"),
        (
            ['{"prompt": "a", "completion": "b", "my answers": [{"role": "user", "content": "c"}]}'],
            "--columns prompt=prompt --columns completion=completion --columns 'history=my answers'",
        ),
        (["{'prompt': 'a'}", "{'prompt': 'b'}"], "json.dumps"),
        (['{"prompt": "a", "completion": ""}', '{"prompt": "b", "completion": ""}'], "mend what wrote the file"),
    ],
)
def test_all_rows_fail_for_one_reason(tmp_path: Path, lines: list[str], remedy: str) -> None:
    (said,) = remedies(tmp_path, lines)
    assert remedy in said
    with pytest.raises(DataError, match="nothing was written") as error:
        repair(tmp_path / "rows.jsonl", tmp_path / "new.jsonl", None)
    assert remedy in str(error.value)


def test_only_some_rows_fail(tmp_path: Path) -> None:
    good = json.dumps({"prompt": "Who?", "completion": "She."})
    assert remedies(tmp_path, [good, *LABELLED]) == ["correct or remove these rows"]


def test_a_key_that_is_nearly_right_is_offered(tmp_path: Path) -> None:
    named = Decided(columns={"prompt": "frage", "completion": "Antwort"})
    (said,) = remedies(tmp_path, ['{"Frage": "Wer?", "Antwort": "Sie."}'] * 2, named)
    assert said.endswith("safetrain validate FILE --columns prompt=Frage --columns completion=Antwort")
    (said,) = remedies(tmp_path, ['{"one": "Wer?", "two": "Sie."}'] * 2, named)
    assert "name keys that the rows have" in said

"""Counts and durations read well."""

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from safetrain.core.formatting import counted, duration_text, override, similar_path


def test_counts_and_durations_are_as_people_say_them() -> None:
    told = [counted(number, "bad row") for number in (0, 1, 2, 11)]
    assert told == ["0 bad rows", "1 bad row", "2 bad rows", "11 bad rows"]
    told = [duration_text(seconds) for seconds in (0.2, 40, 720, 27_000, 172_799, 302_400)]
    assert told == ["1 s", "40 s", "12 min", "7.5 h", "48.0 h", "3.5 days"]


@pytest.mark.parametrize(
    "path", ["a/b-1.jsonl", "my data/mein öl.jsonl", "a=b.jsonl", "it's", 'a"b', "a,[b]", "${x}", "end\\"]
)
def test_an_override_can_be_pasted(path: str) -> None:
    (word,) = shlex.split(override("data.path", path))
    value = OverridesParser.create().parse_override(word).value()
    assert str(OmegaConf.create({"path": str(value)}).path) == path
    assert override("data.path", "data/rows.jsonl") == "data.path=data/rows.jsonl"  # without quotes


def test_a_missing_path_gets_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "data" / "example").mkdir(parents=True)
    assert similar_path(tmp_path / "data" / "exmaple") == f"did you mean {tmp_path}/data/example?"
    assert similar_path(tmp_path / "data" / "rows.jsonl") == ""
    assert similar_path(tmp_path / "nowhere" / "rows.jsonl") == ""

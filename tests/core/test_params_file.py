"""params.yaml: a value is written and all else stays; a run's values are put back, whatever ends the run."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from safetrain.core.errors import ConfigError
from safetrain.core.params_file import PARAMS, RECORD, left_behind, lent, put_back, values_in, with_value
from tests.conftest import ROOT

SHIPPED = (ROOT / "params.yaml").read_text(encoding="utf-8")
ODD = """%YAML 1.2
---
# Mine
train:
    seed: 0x2a    # hex
    lr:   1e-4
    text: "quoted"   # ç
    empty:
    said:  # later
    list:   # names
      - 1
      -   2
    # about the next
    flow: [ 1,2 , 3 ]
    long: |
      text
        more

    last: no


lora: {rank: 8, scale: 1.50}   # one line
"""
VALUES = ("a=[b] (ç) #1", "no", "1e-4", "a\nb", ["a", 0.5], {"prompt": "Frage"}, None, True, 1e-5, 7)


@pytest.mark.parametrize("text", [SHIPPED, ODD, ODD.replace("\n", "\r\n")], ids=["shipped", "odd", "crlf"])
def test_a_value_is_written_and_all_else_stays(text: str) -> None:
    before, lines = values_in(text), text.splitlines()
    for number, key in enumerate(before):
        for value in (VALUES[number % len(VALUES)],) if text is SHIPPED else VALUES:
            changed = with_value(text, key, value)
            assert values_in(changed) == {**before, key: value}
            assert changed.count("#") >= text.count("#")
            assert len(set(lines) - set(changed.splitlines())) <= 4  # a list's own lines
        assert values_in(with_value(changed, key, before[key])) == before
    assert with_value(with_value(SHIPPED, "train.seed", 7), "train.seed", 42) == SHIPPED


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"params.yaml has no train.sed(.|\n)*safetrain update"):
        with_value(SHIPPED, "train.sed", 1)
    shared = "train:\n  seed: &one 5\n  steps: *one\n"
    for key in ("train.seed", "train.steps"):
        with pytest.raises(ConfigError, match=f"{key} cannot be written"):
            with_value(shared, key, 1)
    with pytest.raises(ConfigError, match=r"where: +params.yaml:2"):
        values_in("train: [\n}")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    PARAMS.write_bytes(ODD.replace("\n", "\r\n").encode())
    return tmp_path


RUN_VALUES = {"train.seed": 7, "lora.rank": 32}
KILLED = """
import os
from safetrain.core.params_file import lent, read_params, with_value
with lent(with_value(with_value(read_params(), "train.seed", 7), "lora.rank", 32), "safetrain run train.seed=7"):
    os._exit(9)
"""


def killed_run(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], cwd=folder, check=False)
    assert values_in(PARAMS.read_text()).items() >= RUN_VALUES.items()


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, ConfigError("failed"), SystemExit])
def test_a_run_s_values_are_put_back(project: Path, end: BaseException | type[BaseException] | None) -> None:
    before = PARAMS.read_bytes()
    if end is None:
        with lent(SHIPPED, "safetrain run a"):
            assert PARAMS.read_text() == SHIPPED
    else:
        with pytest.raises(BaseException), lent(SHIPPED, "safetrain run a"):  # noqa: B017, PT011
            raise end
    assert (PARAMS.read_bytes(), RECORD.exists(), left_behind()) == (before, False, "")


def test_after_a_kill_the_file_s_values_have_a_name(project: Path) -> None:
    before = PARAMS.read_bytes()
    killed_run(project)
    said = left_behind()
    for part in (
        "'safetrain run train.seed=7', which was killed",
        "train.seed=7 (before: 42)",
        "lora.rank=32 (before: 8)",
    ):
        assert part in said
    assert (put_back(), PARAMS.read_bytes(), left_behind()) == ("safetrain run train.seed=7", before, "")
    assert put_back() == ""


EDITS: list[tuple[Callable[[str], str], dict[str, object]]] = [
    (lambda text: text.replace("rank: 32", "rank: 64"), {"lora.rank": 64}),
    (lambda text: text.replace("last: no", "last: yes"), {"train.last": True}),
    (lambda text: text + "mine:\n  own: 1\n", {"mine.own": 1}),
    (lambda text: text.replace("seed: 7 ", "seed: 42 "), {}),
]


@pytest.mark.parametrize(("edit", "kept"), EDITS)
def test_edits_after_a_kill_stay(project: Path, edit: Callable[[str], str], kept: dict[str, object]) -> None:
    before = values_in(PARAMS.read_text())
    killed_run(project)
    PARAMS.write_text(edit(PARAMS.read_text()))
    assert put_back() == "safetrain run train.seed=7"
    assert values_in(PARAMS.read_text()) == {**before, **kept}


def test_a_file_that_an_edit_broke_waits_for_its_owner(project: Path) -> None:
    killed_run(project)
    good = PARAMS.read_text()
    PARAMS.write_text(good + "x: [\n")
    with pytest.raises(ConfigError, match=r"params.yaml is not valid YAML"):
        put_back()
    PARAMS.write_text(good)
    assert (put_back(), yaml.safe_load(PARAMS.read_text())["lora"]["rank"]) == ("safetrain run train.seed=7", 8)


def test_a_link_stays_a_link(project: Path) -> None:
    (project / "elsewhere").mkdir()
    target = PARAMS.rename(project / "elsewhere/values.yaml")
    PARAMS.symlink_to(target)
    with lent(SHIPPED, "safetrain run a"):
        assert target.read_text() == SHIPPED
    assert PARAMS.is_symlink()

"""What people do with the page beside the usual way: begin with nothing, drop a folder again, name their columns."""

import json
import re
from collections.abc import Iterator
from html import unescape

import pytest

from tests.page.opened import Page, opened
from tests.support.chaos.project import wait_for


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAFETRAIN_LOCK_DIR", str(tmp_path_factory.mktemp("lock")))
        with opened(tmp_path_factory.mktemp("buttons"), example=False) as served:
            yield served


def wait_for_text(page: Page, text: str) -> None:
    wait_for(lambda: text in unescape(page.get()[2]), f"the text {text}", 60)


def test_an_empty_folder_becomes_a_project(page: Page) -> None:
    assert "safetrain init --example" in page.get()[2]
    assert "Made a project" in page.post("init", example="1")[2]
    assert (page.folder / "data/example/train.jsonl").is_file()
    wait_for_text(page, 'id="value-train.learning_rate"')
    wait_for_text(page, "will run")  # DVC has said so


def test_a_folder_dropped_again_is_another_folder(page: Page) -> None:
    row = b'{"prompt": "a", "completion": "b"}\n'
    for place in ("my rows & more", "my rows _ more-2"):
        first = page.put("my%20rows%20%26%20more/train.jsonl?first", row)[2]
        assert first == f"data/{place.replace('&', '_')}/train.jsonl"
        folder = first.split("/")[1].replace(" ", "%20")
        assert page.put(f"{folder}/deep/valid.jsonl", row)[2] == f"{first.rpartition('/')[0]}/deep/valid.jsonl"


@pytest.mark.parametrize("name", ["x.dvc", "folder/dvc.yaml", "dvc.lock"])
def test_what_dvc_would_read_is_no_data(page: Page, name: str) -> None:
    status, _, text = page.put(name, b"{")
    assert (status, "cannot be kept" in text) == (400, True)


def test_columns_are_named_and_forgotten(page: Page) -> None:
    rows = "".join(f"What is the capital of country {n}?,It is city {n}.\n" for n in range(30))
    page.put("fremd.csv", f"frage,antwort\n{rows}".encode())
    page.post("check", path="data/fremd.csv")
    wait_for_text(page, "The columns were not recognised")
    page.post("columns", **{"path": "data/fremd.csv", "column.prompt": "frage", "column.completion": "antwort"})
    wait_for_text(page, "data/fremd.csv: 30 rows, ")
    wait_for_text(page, "Forget these columns: antwort, frage")
    page.post("columns", path="data/example")
    wait_for_text(page, "data/example: 1,980 rows, 48,581 tokens")
    assert "Forget these columns" not in page.get()[2]


def test_data_that_was_edited_will_be_read_again(page: Page) -> None:
    page.post("plan")
    wait_for_text(page, "Plan again")
    wait_for_text(page, "<b>validate_data</b><span>up to date</span>")
    file = page.folder / "data/example/train.jsonl"
    file.write_text(file.read_text() + json.dumps({"prompt": "a new row", "completion": "yes"}) + "\n")
    wait_for_text(page, "<b>validate_data</b><span>will run</span>")


def test_the_command_beside_a_button_is_the_one_that_runs(page: Page) -> None:
    name = "Perguntas%20do%20Jo%C3%A3o%20(1).csv"
    saved = page.put(name, b"prompt,completion\na,b\nc,\ne,f\n")[2]
    page.post("check", path=saved)
    wait_for_text(page, f"{saved}: 3 rows")
    shown = {unescape(text) for text in re.findall(r"<code[^>]*>(safetrain [^<]*)</code>", page.get()[2])}
    assert f"safetrain validate '{saved}' --json" in shown
    repair = f"safetrain validate '{saved}' --fix 'data/Perguntas do João (1)-repaired.jsonl' --drop-bad"
    assert {
        repair,
        f"safetrain set data.path='{saved}'",
        "safetrain set lora.rank=null",
        "safetrain set train.method=lora",
    } <= shown
    assert repair in unescape(page.post("repair", path=saved, drop="ROW-UNREADABLE")[2])
    assert "$ safetrain set train.method=lora" in page.post("set", key="train.method", value="")[2]

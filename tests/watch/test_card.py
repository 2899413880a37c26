"""The model card says what was measured, as the hub reads it, and nothing of the rows or of this machine."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from safetrain.core.errors import ConfigError
from safetrain.core.records.adapter_files import Taught, fingerprint, write_taught
from safetrain.core.records.fusing import REPORT, FuseReport, Likeness, Tried
from safetrain.core.records.record_files import write_record
from safetrain.watch.card import Records, write_card
from tests.watch.test_result import written

SECRET = "You are the assistant of Anna Example."


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """An adapter with all that a run leaves, and its base, fetched from the hub."""
    _, _, adapter = written(tmp_path, "What is Anna's address?")
    (adapter / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "dora", "model": str(tmp_path / "base")})
    )
    write_taught(adapter, Taught((1,), "<think>", "", SECRET))
    summary = {
        "train_rows": 1656,
        "steps": 312,
        "learning_rate": 1.3e-3,
        "seed": 42,
        "lora": {"rank": 16, "scale": 2.0},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "data.json").write_text(json.dumps({"source": "data/anna.jsonl", "train": {"trained_tokens": 16575}}))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / ".hub_id").write_text("owner/Base-4bit\nabc\n")
    return tmp_path


def fused(project: Path, name: str = "tuned") -> Path:
    folder = project / name
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    base, tuned = Likeness(2.5, 1.0, 0.2, 0.0, 0, 0, 0), Likeness(0.5, 0.0, 1.0, 1.0, 9, 0, 0)
    kept = Likeness(0.51, 0.01, 0.99, 0.95, 9, 0, 0)
    tried = (Tried("4 bits", 2**20, 0.7, base, "loses more"), Tried("8 bits", 2**21, 0.991, kept, ""))
    print_of = fingerprint(project / "adapters")
    write_record(folder / REPORT, FuseReport("base", "x", print_of, 100, 900, 0.02, base, tuned, tried, "8 bits"))
    return folder


def card(project: Path, folder: Path, *, replace: bool = False) -> tuple[str, list[str]]:
    records = Records(project / "evaluation.json", project / "summary.json", project / "data.json")
    remarks = write_card(folder, project / "adapters", project / "base", records, replace=replace)
    return (folder / "README.md").read_text(), remarks


def test_the_hub_reads_it_and_people_find_the_figures(project: Path) -> None:
    text, remarks = card(project, fused(project))
    head = ModelCard(text).data.to_dict()
    assert head == {
        "library_name": "mlx", "pipeline_tag": "text-generation", "base_model": "owner/Base-4bit",
        "base_model_relation": "finetune", "tags": ["mlx", "safetrain", "dora"],
    }  # fmt: skip
    path = f"fuse_report.json has a path of this machine: {project / 'base'}"
    assert remarks == [path, "no licence stands in it: add the base model's"]
    for words in (
        "# tuned", "better than base by 0.75 ± 0.25 nats per label, n = 2", "50.0 % (10.0 to 90.0)", "| rows | 1656 |",
        "| rank | 16 |", "8 bits, 2.0 MiB, keeps 99.1 %", "| this folder | 0.5100 | 95 of 100 |",
        "same system prompt", '`"<think>"`', "https://huggingface.co/owner/Base-4bit",
    ):  # fmt: skip
        assert words in text, words


def test_no_row_no_path_and_no_system_prompt_gets_out(project: Path) -> None:
    text, _ = card(project, fused(project))
    for secret in ("Anna", "anna", SECRET, str(project)):
        assert secret not in text


def test_the_licence_is_the_base_s_own_where_its_card_names_it(project: Path) -> None:
    (project / "base" / "README.md").write_text("---\nlicense: apache-2.0\ntags:\n- best\n---\n# The best model\n")
    text, remarks = card(project, fused(project))
    assert ModelCard(text).data.license == "apache-2.0"
    assert not any("no licence stands" in remark for remark in remarks)
    assert "best model" not in text


def test_a_result_of_another_adapter_is_left_out_and_told(project: Path) -> None:
    folder = fused(project)
    (project / "evaluation.json").write_text(
        (project / "evaluation.json").read_text().replace(fingerprint(project / "adapters"), "other")
    )
    text, remarks = card(project, folder)
    assert "about another adapter" in remarks[0]
    assert "0.75" not in text
    assert "1656" not in text
    (project / "evaluation.json").unlink()
    assert "has not been evaluated" in card(project, folder, replace=True)[1][0]
    (project / "adapters" / "adapters.safetensors").write_bytes(b"other weights")
    with pytest.raises(ConfigError, match="fused from another adapter"):
        card(project, folder, replace=True)


def test_a_card_that_is_there_is_not_overwritten_unasked(project: Path) -> None:
    folder = fused(project)
    (folder / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"README.md already"):
        card(project, folder)
    assert (folder / "README.md").read_text() == "mine"
    assert "# tuned" in card(project, folder, replace=True)[0]


@pytest.mark.parametrize(
    ("files", "library", "relation"),
    [
        ({"adapter_config.json": '{"fine_tune_type": "lora"}'}, "mlx", "adapter"),
        ({"adapter_config.json": '{"peft_type": "LORA"}'}, "peft", "adapter"),
        ({"tuned.gguf": ""}, "gguf", "quantized"),
    ],
)
def test_other_folders_are_known_by_their_files(
    project: Path, files: dict[str, str], library: str, relation: str
) -> None:
    folder = project / "out"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    head = ModelCard(card(project, folder)[0]).data
    assert (head.library_name, head.base_model_relation) == (library, relation)
    (project / "empty").mkdir()
    with pytest.raises(ConfigError, match="no model in this folder"):
        card(project, project / "empty")

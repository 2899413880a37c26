"""The model card says what was measured, as the hub reads it, and nothing of the rows or of this machine."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError
from safetrain.core.records.adapter_files import Taught, fingerprint, write_taught
from safetrain.core.records.exporting import GgufReport
from safetrain.core.records.fusing import REPORT, FuseReport, Likeness, Tried
from safetrain.core.records.peft_report import PeftReport
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
        "trained_tokens": 16575,
        "steps": 312,
        "learning_rate": 1.3e-3,
        "seed": 42,
        "lora": {"rank": 16, "scale": 2.0},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
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
    write_record(
        folder / REPORT, FuseReport(str(project / "base"), "x", print_of, 100, 900, 0.02, base, tuned, tried, "8 bits")
    )
    return folder


def exported(project: Path, kind: str) -> Path:
    """What the two commands of `safetrain export` leave, of the project's adapter."""
    folder = project / kind
    folder.mkdir()
    base, print_of, like = (
        str(project / "base"),
        fingerprint(project / "adapters"),
        Likeness(0.5, 0.0, 1.0, 1.0, 9, 0, 0),
    )
    if kind == "peft":
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
        report = PeftReport(base, "x", 4, base, print_of, "PEFT", 10, 90, like, like, like, 1.0, None, (1,))
        write_record(folder / "export_report.json", report)
    else:
        (folder / "tuned.gguf").touch()
        gguf = GgufReport(
            "tuned.gguf", "q8_0", 9, "llama", "gpt2", base, "x", print_of, 10, 90, like, like, like, 1.0, None, ()
        )
        write_record(folder / "tuned.gguf.json", gguf)
    return folder


def card(
    project: Path, folder: Path, adapter: Path | None = None, *, base: Path | None = None, replace: bool = False
) -> tuple[str, list[str]]:
    files = [project / name for name in ("evaluation.json", "summary.json", "adapters")]
    remarks = write_card(folder, adapter, base, Records(*files), replace=replace)
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
        "General text costs 0.10 ± 0.02 nats per token more than the base's", "same system prompt", '`"<think>"`', "https://huggingface.co/owner/Base-4bit",
    ):  # fmt: skip
        assert words in text, words
    assert "was not measured" not in text


def test_the_command_writes_it(project: Path) -> None:
    folder = fused(project)
    done = CliRunner().invoke(app, ["card", str(folder), "--adapter", str(project / "adapters")])
    assert done.exit_code == 0, done.output
    assert "base_model: owner/Base-4bit" in (folder / "README.md").read_text()


def test_no_row_no_path_and_no_system_prompt_gets_out(project: Path) -> None:
    text, _ = card(project, fused(project))
    for secret in ("Anna", "anna", SECRET, str(project)):
        assert secret not in text


def test_the_licence_is_the_base_s_own_where_its_card_names_it(project: Path) -> None:
    (project / "base" / "README.md").write_text("---\nlicense: apache-2.0\ntags:\n- best\n---\n# The best model\n")
    text, remarks = card(project, fused(project))
    assert ModelCard(text).data.license == "apache-2.0"
    assert not any("no licence" in remark for remark in remarks)
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
    text, remarks = card(project, folder, replace=True)
    assert "has not been evaluated" in remarks[0]
    assert "What it has forgotten of the base was not measured." in text
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


@pytest.mark.parametrize("kind", ["fused", "peft", "gguf"])
def test_a_folder_that_was_made_from_another_adapter_is_refused(project: Path, kind: str) -> None:
    folder = fused(project) if kind == "fused" else exported(project, kind)
    made_from = project / "adapters"
    assert "0.75" in card(project, folder)[0]
    other = shutil.copytree(made_from, project / "other")
    (other / "adapters.safetensors").write_bytes(b"another training")
    with pytest.raises(ConfigError, match="from another adapter"):
        card(project, folder, other, replace=True)
    made_from.rename(project / "kept")
    other.rename(made_from)  # trained again since
    with pytest.raises(ConfigError, match="from another adapter"):
        card(project, folder, replace=True)
    text, remarks = card(project, folder, project / "kept", replace=True)
    assert "0.75" in text
    assert "nothing in the folder shows" not in " ".join(remarks)


@pytest.mark.parametrize("kind", ["fused", "peft", "gguf"])
def test_without_a_report_the_adapter_has_to_be_named(project: Path, kind: str) -> None:
    folder = fused(project) if kind == "fused" else exported(project, kind)
    report = next(path for path in folder.iterdir() if path.name.endswith(("report.json", ".gguf.json")))
    report.unlink()
    with pytest.raises(ConfigError, match="which adapter it was made from"):
        card(project, folder)
    text, remarks = card(project, folder, project / "adapters")
    assert "0.75" in text
    assert any("nothing in the folder shows that it was made from this adapter" in remark for remark in remarks)


def test_an_adapter_s_folder_is_described_by_itself(project: Path) -> None:
    other = project / "other"
    other.mkdir()
    (other / "adapters.safetensors").write_bytes(b"of somebody else")
    config = {"fine_tune_type": "lora", "model": "models/another"}
    (other / "adapter_config.json").write_text(json.dumps(config))
    text, remarks = card(project, other)
    assert "0.75" not in text
    assert "models--another" not in text
    assert "another, fine-tuned with safetrain (lora)" in text
    assert "about another adapter" in remarks[0]
    with pytest.raises(ConfigError, match="an adapter by itself"):
        card(project, other, project / "adapters", replace=True)
    assert "0.75" in card(project, project / "adapters")[0]


@pytest.mark.parametrize("kind", ["fused", "peft", "gguf", "adapter"])
def test_each_file_that_names_a_path_of_this_machine_is_named(project: Path, kind: str) -> None:
    made = {"fused": lambda: fused(project), "adapter": lambda: project / "adapters"}
    folder = made.get(kind, lambda: exported(project, kind))()
    names = {
        "fused": ["fuse_report.json"], "peft": ["adapter_config.json", "export_report.json"],
        "gguf": ["tuned.gguf.json"], "adapter": ["adapter_config.json"],
    }[kind]  # fmt: skip
    remarks = card(project, folder)[1]
    for name in names:
        assert f"{name} has a path of this machine: {project / 'base'}" in remarks
    assert sum("path of this machine" in remark for remark in remarks) == len(names)
    for name in names:
        (folder / name).write_text((folder / name).read_text().replace(str(project / "base"), "owner/Base"))
    remarks = card(project, folder, base=project / "base", replace=True)[1]
    assert not any("path of this machine" in remark for remark in remarks)


@pytest.mark.parametrize(("kind", "again"), [("fused", "fuse"), ("peft", "export peft"), ("gguf", "export gguf")])
def test_a_damaged_report_is_made_again_by_its_own_command(project: Path, kind: str, again: str) -> None:
    folder = fused(project) if kind == "fused" else exported(project, kind)
    report = next(path for path in folder.iterdir() if path.name.endswith(("report.json", ".gguf.json")))
    whole = json.loads(report.read_text())
    damages = [report.read_text()[:50], "[]", "{}", json.dumps({**whole, "base": 3})]
    for damage in [*damages, *([json.dumps({**whole, "chosen": "7 bits"})] if kind == "fused" else [])]:
        report.write_text(damage)
        with pytest.raises(ConfigError, match=report.name) as caught:
            card(project, folder)
        assert f"safetrain {again} OUT" in caught.value.do


@pytest.mark.parametrize(
    ("kind", "library", "relation"),
    [("adapters", "mlx", "adapter"), ("peft", "peft", "adapter"), ("gguf", "gguf", "quantized")],
)
def test_other_folders_are_known_by_their_files(project: Path, kind: str, library: str, relation: str) -> None:
    folder = project / "adapters" if kind == "adapters" else exported(project, kind)
    head = ModelCard(card(project, folder)[0]).data
    assert (head.library_name, head.base_model_relation) == (library, relation)
    (project / "empty").mkdir()
    with pytest.raises(ConfigError, match="no model in this folder"):
        card(project, project / "empty")

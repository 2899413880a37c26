"""The model card says what was measured, as the hub reads it, and nothing of the rows or of this machine."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from safetrain.core.errors import ConfigError
from safetrain.core.records.adapter_files import CHAT_FILE, PromptFormat, fingerprint
from safetrain.core.records.evaluation import REPORT, ExportReport, Likeness
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.watch.result import write_card
from safetrain.watch.run_folder import read_run
from tests.watch.made_run import change, evaluation, make_run, sample

SECRET = "You are the assistant of Anna Example."
LIKE = Likeness(0.5, 0.0, 1.0, 9, 0, 0)
KINDS = {  # library, relation to the base
    "fused": ("mlx", "finetune"),
    "peft": ("peft", "adapter"),
    "gguf": ("gguf", "quantized"),
    "adapter": ("mlx", "adapter"),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An adapter with a run's records, and its base model, fetched from the hub."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, found=evaluation((sample("What is Anna's address?"),), gain=0.75), train_rows=1656)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / ".hub_id").write_text("owner/Base-4bit\nabc\n")
    config = {"fine_tune_type": "dora", "model": str(tmp_path / "base")}
    (paths.ADAPTERS / "adapter_config.json").write_text(json.dumps(config))
    write_record(paths.ADAPTERS / CHAT_FILE, PromptFormat((1,), "<think>", "", SECRET))
    return tmp_path


def made(project: Path, kind: str) -> Path:
    """The folder that fuse or export writes of the project's adapter."""
    if kind == "adapter":
        return paths.ADAPTERS
    folder, base, of_adapter = Path(kind), str(project / "base"), fingerprint(paths.ADAPTERS)
    folder.mkdir()
    if kind == "fused":
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()
        kept = Likeness(0.51, 0.01, 0.95, 9, 0, 0)
        report = ExportReport("8 bits", 2**21, base, "x", of_adapter, 100, 900, LIKE, LIKE, kept, 0.991, ())
        write_record(folder / REPORT, report)
        return folder
    report = ExportReport("q8_0", 9, base, "x", of_adapter, 10, 90, LIKE, LIKE, LIKE, 1.0, (1,))
    if kind == "peft":
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
        write_record(folder / "export_report.json", report)
    else:
        (folder / "tuned.gguf").touch()
        write_record(folder / "tuned.gguf.json", report)
    return folder


def card(folder: Path, adapter: Path | None = None) -> tuple[str, list[str]]:
    remarks = write_card(folder, adapter, None, read_run())
    return (folder / "README.md").read_text(), remarks


def test_it_says_what_was_measured(project: Path) -> None:
    text, _ = card(made(project, "fused"))
    assert ModelCard(text).data.to_dict() == {
        "library_name": "mlx", "pipeline_tag": "text-generation", "base_model": "owner/Base-4bit",
        "base_model_relation": "finetune", "tags": ["mlx", "safetrain", "dora"],
    }  # fmt: skip
    for words in (
        "# fused", "https://huggingface.co/owner/Base-4bit", "better by 0.75 ± 0.25 (95 %, 9 rows)",
        "| coverage | 1,656 rows, ",
        "| 10.0 % (5.0 to 30.0) |", "| rank | 4 |",
        "| THIS_FOLDER (8 bits) | 2.0 MiB | 99.1 % | 0.0100 | 95 of 100 rows | 0.5100 |",
        "same system prompt", '`"<think>"`',
        "Forgetting: general text loss +0.10 ± 0.02 nats per token",
    ):  # fmt: skip
        assert words in text, words
    assert not [secret for secret in ("Anna", SECRET, str(project)) if secret in text]
    assert "\n\n\n" not in text


def test_the_licence_is_the_base_s_and_the_results_are_this_adapter_s(project: Path) -> None:
    folder = made(project, "fused")
    assert "the card has no licence: add the base model's" in card(folder)[1]
    (project / "base" / "README.md").write_text("---\nlicense: apache-2.0\ntags:\n- best\n---\n# The best model\n")
    text, remarks = card(folder)
    assert ModelCard(text).data.license == "apache-2.0"
    assert "best model" not in text
    assert not any("no licence" in remark for remark in remarks)
    change(paths.EVALUATION, adapter=["other"])
    text, remarks = card(folder)
    assert ("0.75" in text, "1656" in text, "about another adapter" in remarks[-1]) == (False, False, True)
    paths.EVALUATION.unlink()
    text, remarks = card(folder)
    assert ("Forgetting was not measured." in text, "no evaluation yet" in remarks[-1]) == (True, True)


@pytest.mark.parametrize("kind", KINDS)
def test_each_folder_is_known(project: Path, kind: str) -> None:
    folder = made(project, kind)
    data = ModelCard(card(folder)[0]).data
    assert (data.library_name, data.base_model_relation) == KINDS[kind]
    (project / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"This folder has no model[^$]*do: +safetrain fuse OUT"):
        card(project / "empty")
    paths.SUMMARY.unlink()  # as before any training
    with pytest.raises(ConfigError, match=r"This folder has no model[^$]*do: +train first: safetrain run"):
        card(project / "empty")


@pytest.mark.parametrize("kind", ["fused", "peft", "gguf"])
def test_a_folder_of_another_adapter_is_refused(project: Path, kind: str) -> None:
    folder = made(project, kind)
    assert "0.75" in card(folder)[0]
    other = shutil.copytree(paths.ADAPTERS, project / "other")
    (other / "adapters.safetensors").write_bytes(b"another training")
    with pytest.raises(ConfigError, match="made from another adapter"):
        card(folder, other)
    report = next(path for path in folder.iterdir() if path.name.endswith(("report.json", ".gguf.json")))
    report.write_text("{}")
    with pytest.raises(ConfigError, match=report.name) as caught:
        card(folder)
    assert "export it again" in caught.value.do
    report.unlink()
    with pytest.raises(ConfigError, match="which adapter it was made from"):
        card(folder)
    text, remarks = card(folder, paths.ADAPTERS)
    assert "0.75" in text
    assert "no report in the folder shows its adapter" in remarks[-1]

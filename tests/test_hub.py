"""The Hub: `safetrain fetch`, `run --data hub:…` and `push`. The client's own calls are replaced, and nothing else."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError, DataError, DiskFullError, ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.storage import paths
from safetrain.data.folders import data_files_of
from safetrain.plan.hub import fetch
from tests.conftest import ROOT
from tests.engine.test_fuse import adapter_of

Build = Callable[..., Path]


COMMIT = "a5339a4131f135d0fdc6a5c8b5bbed2753bbe0f3"


@pytest.fixture
def hub(tiny_model: Build, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A hub that serves one model from a folder: the network is all that is replaced."""
    served = tiny_model("served")
    state = SimpleNamespace(size=1000, truncate=False, main=COMMIT)
    files = [SimpleNamespace(rfilename="model.safetensors", size=state.size)]

    def info(_self: object, _hub_id: str, files_metadata: bool) -> SimpleNamespace:
        assert files_metadata
        files[0].size = state.size
        told, state.main = state.main, "f" * 40  # a commit is made right after
        return SimpleNamespace(siblings=files, sha=told)

    def download(_hub_id: str, repo_type: str, revision: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        if repo_type == "dataset":
            Path(local_dir, "data").mkdir(parents=True)
            shutil.copy(ROOT / "data" / "example" / "test.jsonl", Path(local_dir, "data", "train-00000-of-00001.jsonl"))
            return
        assert "*.safetensors" in allow_patterns
        state.served = revision or state.main
        shutil.copytree(served, local_dir, dirs_exist_ok=True)
        if state.truncate:
            weights = Path(local_dir) / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-100])

    for kind in ("model", "dataset"):
        monkeypatch.setattr(f"huggingface_hub.HfApi.{kind}_info", info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return state


def test_a_fetched_model_is_whole_and_of_one_commit_which_is_written_down(hub: SimpleNamespace, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["fetch", "owner/name", "--into", str(tmp_path / "models")])
    folder = tmp_path / "models" / "name"
    assert (done.exit_code, f"model.path: {folder}" in done.output) == (0, True)
    assert read_model_files(folder).model_type == "llama"
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["name"]
    assert (hub.served, (folder / ".hub_id").read_text().split()) == (COMMIT, ["owner/name", COMMIT])
    assert fetch("owner/name", tmp_path / "models") == folder
    with pytest.raises(ModelError, match="something else with this name") as caught:
        fetch("somebody/name", tmp_path / "models")
    assert "owner/name" in str(caught.value)


def test_a_fetched_data_set_is_a_folder_that_data_path_names(hub: SimpleNamespace, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["fetch", "datasets/owner/name", "--into", str(tmp_path)])
    assert (done.exit_code, f"data.path: {tmp_path / 'name'}" in " ".join(done.output.split())) == (0, True)
    assert (tmp_path / "name" / ".hub_id").read_text().split() == ["datasets/owner/name", COMMIT]
    assert CliRunner().invoke(app, ["validate", str(tmp_path / "name")]).exit_code == 0
    with pytest.raises(ModelError, match="something else with this name"):
        fetch("owner/name", tmp_path)


def test_half_a_download_gets_no_name_and_a_small_disk_is_told_before(hub: SimpleNamespace, tmp_path: Path) -> None:
    hub.size = 2**60
    with pytest.raises(DiskFullError, match="no room"):
        fetch("owner/name", tmp_path / "models")
    hub.size = 1000
    hub.truncate = True
    with pytest.raises(ModelError, match="not fully downloaded"):
        fetch("owner/name", tmp_path / "models")
    assert not (tmp_path / "models" / "name").exists()


def test_without_a_network_the_error_is_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="did not finish") as caught:
        fetch("owner/name", tmp_path / "models")
    assert "where:    http://127.0.0.1:9\n  do:       check the internet connection" in str(caught.value)
    assert "the download continues" in str(caught.value)


@pytest.mark.parametrize("hub_id", ["Qwen2.5", "owner/", "/name", "no//such id", "owner/such id", "https://hub/a/b"])
def test_what_is_no_hub_id_is_told_before_anything(tmp_path: Path, hub_id: str) -> None:
    (tmp_path / "Qwen2.5").mkdir()
    with pytest.raises(ModelError, match=r"is not a Hub ID.\n  expected: owner/name, or datasets/owner/name"):
        fetch(hub_id, tmp_path)


def test_a_gated_model_says_how_to_log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the one command that huggingface-hub installs."""
    from huggingface_hub.errors import GatedRepoError

    refusal = GatedRepoError("401", response=Mock(headers={}))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", Mock(side_effect=refusal))
    with pytest.raises(ModelError, match="for a gated model: hf auth login"):
        fetch("owner/name", tmp_path)
    assert shutil.which("hf", path=str(Path(sys.executable).parent))


def test_data_on_the_hub_is_fetched_once_and_its_folder_written_into_params(
    hub: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("safetrain.cli_run.STAGES", ())
    (tmp_path / "params.yaml").write_text("model:\n  path: m\ndata:\n  path: d # mine\n")
    for source, model in (("hub:owner/rows", "hub:owner/name"), ("datasets/owner/rows", "models/name")):
        said = CliRunner().invoke(app, ["run", "--data", source, "--model", model]).stdout
        assert "data.path is data/rows\nparams.yaml: model.path is models/name\n" in said
        assert "path: data/rows # mine" in (tmp_path / "params.yaml").read_text()
        assert (tmp_path / "data/rows/.hub_id").read_text().split() == ["datasets/owner/rows", COMMIT]
        monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", Mock(side_effect=OSError("offline")))
    with pytest.raises(DataError, match=r"do: +safetrain run --data hub:owner/rows"):
        data_files_of(Path("hub:owner/rows"))


def test_a_push_shows_what_it_sends_asks_and_is_private(
    tiny_model: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base, sent = tiny_model("base"), list[tuple[str, dict[str, str]]]()
    (base / ".hub_id").write_text(f"owner/base\n{COMMIT}\n")
    adapter_of(base, paths.ADAPTERS)
    before = {path: path.read_bytes() for path in paths.ADAPTERS.iterdir()}

    def upload(_self: object, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        sent.append((repo_id, {path.name: path.read_text(errors="replace") for path in folder_path.iterdir()}))

    def push(*words: str, answer: str = "") -> str:
        return " ".join(CliRunner().invoke(app, ["push", "me/tuned", *words], input=answer).output.split())

    monkeypatch.setattr("huggingface_hub.HfApi.repo_exists", Mock(return_value=False))
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create := Mock(return_value="https://hub/me/tuned"))
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"not logged in[^$]*do: +hf auth login"):
        CliRunner().invoke(app, ["push", "me/tuned"], catch_exceptions=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_secret")
    assert "adapters.safetensors" in (said := push(answer="n\n"))
    assert "to the new private repository me/tuned? [y/N]" in said
    assert not sent
    assert "https://hub/me/tuned" in (said := push("--yes"))
    assert "hf_secret" not in said + str(sent)
    ((name, files),) = sent
    assert (name, create.call_args.kwargs["private"]) == ("me/tuned", True)
    assert files.keys() == {"README.md", *(path.name for path in before)}
    assert '"model": "owner/base"' in files["adapter_config.json"]
    assert str(tmp_path) not in "".join(files.values())
    assert {path: path.read_bytes() for path in paths.ADAPTERS.iterdir()} == before
    monkeypatch.setattr("huggingface_hub.HfApi.repo_exists", Mock(return_value=True))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", Mock(return_value=SimpleNamespace(private=False)))
    assert "to the existing public repository me/tuned" in push(answer="n\n")
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", Mock(side_effect=OSError("403 Forbidden")))
    with pytest.raises(ModelError, match=r"The upload failed: 403 Forbidden[^$]*hf auth whoami"):
        CliRunner().invoke(app, ["push", "me/tuned", "--yes"], catch_exceptions=False)

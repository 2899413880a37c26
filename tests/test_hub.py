"""The Hub: `safetrain fetch`, `run --data hub:…` and `push`. Downloads come from a Hub on this machine."""

import hashlib
import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError, DataError, DiskFullError, ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.storage import paths
from safetrain.data.folders import data_files_of
from safetrain.plan.hub import HF_AUTH, fetch
from safetrain.watch.result import write_card
from safetrain.watch.run_folder import read_run
from tests.conftest import ROOT
from tests.export.test_fuse import adapter_of

Build = Callable[..., Path]


COMMIT = "a5339a4131f135d0fdc6a5c8b5bbed2753bbe0f3"


class Hub(ThreadingHTTPServer):
    """A Hub on this machine: repositories by ID (``datasets/…`` too), each the files of its newest commit."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits = dict[str, list[dict[str, bytes]]]()
        self.broken = ""  # the file that the connection breaks at
        self.spoilt = ""  # the file that arrives with another last byte

    def commit(self, hub_id: str, files: dict[str, bytes]) -> str:
        commits = self.commits.setdefault(hub_id, [])
        commits.append(files)
        return commit_name(hub_id, len(commits) - 1)


def commit_name(hub_id: str, number: int) -> str:
    return hashlib.sha1(f"{hub_id} {number}".encode()).hexdigest()


class Answer(BaseHTTPRequestHandler):
    """The Hub's addresses that a download asks for."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if asked := re.fullmatch(r"api/(?:models|(datasets))/([^/]+/[^/]+)(/tree/\w+)?", path):
            hub_id = f"{asked[1]}/{asked[2]}" if asked[1] else asked[2]
            if hub_id not in self.server.commits:
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return
            number = len(self.server.commits[hub_id]) - 1
            files = self.server.commits[hub_id][number]
            found: object = [listed(name, content) for name, content in files.items()]
            if not asked[3]:
                found = {"id": asked[2], "sha": commit_name(hub_id, number), "siblings": found}
            self.send(200, json.dumps(found).encode())
            return
        hub_id, _, rest = path.partition("/resolve/")
        sha, _, name = rest.partition("/")
        numbers = [n for n in range(len(self.server.commits[hub_id])) if commit_name(hub_id, n) == sha]
        content = self.server.commits[hub_id][numbers[0]][name]
        if name == self.server.broken:
            time.sleep(0.2)  # the other files are there by then
            self.send(403, b"")
            return
        about = {"X-Repo-Commit": sha, "ETag": f'"{listed(name, content)["oid"]}"'}
        if name == self.server.spoilt:
            content = content[:-1] + b"?"
        self.send(200, content, about)

    def send(self, status: int, content: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def listed(name: str, content: bytes) -> dict[str, Any]:
    """A file as the Hub lists it, for a tree and for a repository; weights are in Git LFS."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    found = {"type": "file", "path": name, "rfilename": name, "size": len(content), "oid": blob, "blobId": blob}
    if not name.endswith(".safetensors"):
        return found
    sha = hashlib.sha256(content).hexdigest()
    return {**found, "lfs": {"oid": sha, "sha256": sha, "size": len(content), "pointerSize": 130}}


CARD = b"---\nlicense: 'apache-2.0'\n---\n# A model\n"
ROWS = (ROOT / "data" / "example" / "test.jsonl").read_bytes()


@pytest.fixture
def hub(tiny_model: Build, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that has the model owner/name and the data set datasets/owner/rows."""
    model = {path.name: path.read_bytes() for path in tiny_model("served").iterdir()}
    server = Hub()
    server.commit("owner/name", {**model, "README.md": CARD, "LICENSE": b"Apache", "NOTICE.txt": b"N", "x.bin": b"x"})
    server.commit("datasets/owner/rows", {"data/train-00000-of-00001.jsonl": ROWS, "README.md": CARD, "LICENSE": b"L"})
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield server
    server.shutdown()
    server.server_close()


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_fetched_model_is_whole_and_of_one_commit_which_is_written_down(hub: Hub, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["fetch", "owner/name", "--into", str(tmp_path / "models")])
    folder = tmp_path / "models" / "name"
    assert (done.exit_code, f"model.path: {folder}" in done.output) == (0, True)
    assert read_model_files(folder).model_type == "llama"
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["name"]
    assert names_in(folder) == {*hub.commits["owner/name"][0], ".hub_id"} - {"x.bin"}
    assert (folder / ".hub_id").read_text().split() == ["owner/name", commit_name("owner/name", 0)]
    hub.commits.clear()
    assert fetch("owner/name", tmp_path / "models") == folder
    with pytest.raises(ModelError, match="something else with this name") as caught:
        fetch("somebody/name", tmp_path / "models")
    assert "owner/name" in str(caught.value)


def test_the_card_names_a_fetched_base_and_its_licence(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter_of(fetch("owner/name", Path("models")), paths.ADAPTERS)
    remarks = write_card(paths.ADAPTERS, None, None, read_run())
    data = ModelCard((paths.ADAPTERS / "README.md").read_text()).data
    assert (data.base_model, data.license, "no licence" in str(remarks)) == ("owner/name", "apache-2.0", False)


def test_a_fetched_data_set_is_a_folder_that_data_path_names(hub: Hub, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["fetch", "datasets/owner/rows", "--into", str(tmp_path)])
    assert (done.exit_code, f"data.path: {tmp_path / 'rows'}" in " ".join(done.output.split())) == (0, True)
    rows = commit_name("datasets/owner/rows", 0)
    assert (tmp_path / "rows" / ".hub_id").read_text().split() == ["datasets/owner/rows", rows]
    assert names_in(tmp_path / "rows") == {*hub.commits["datasets/owner/rows"][0], ".hub_id"}
    assert CliRunner().invoke(app, ["validate", str(tmp_path / "rows")]).exit_code == 0
    with pytest.raises(ModelError, match="something else with this name"):
        fetch("owner/rows", tmp_path)
    hub.commit("datasets/owner/books", {"README.md": CARD, "LICENSE.txt": b"L", "a.txt": b"A book."})
    books = fetch("datasets/owner/books", tmp_path)
    assert data_files_of(books, documents=True).paths == (books / "a.txt",)
    hub.commit("datasets/owner/pictures", {"README.md": CARD, "LICENSE.txt": b"L", "a.png": b"a"})
    with pytest.raises(ModelError, match="has no data files"):
        fetch("datasets/owner/pictures", tmp_path)


@pytest.mark.parametrize("second", ["somebody/name", "owner/name", "datasets/owner/name"])
def test_half_a_download_adds_nothing_to_another_owner_s_or_commit_s(hub: Hub, tmp_path: Path, second: str) -> None:
    """A chat template that only the first one has would win over the second one's."""
    whole = hub.commits["owner/name"][0]
    hub.commit("owner/name", {"chat_template.jinja": b"first", "special/data.json": b"{}", **whole})
    hub.broken = "model.safetensors"
    with pytest.raises(ModelError, match="did not finish"):
        fetch("owner/name", tmp_path / "models")
    assert any(path.name == "chat_template.jinja" for path in (tmp_path / "models").rglob("*"))
    hub.broken, wanted = "", {"a.jsonl": ROWS} if second.startswith("datasets") else whole
    commit = hub.commit(second, dict(wanted))
    folder = fetch(second, tmp_path / "models")
    assert names_in(folder) == {*wanted, ".hub_id"} - {"x.bin"}
    assert (folder / ".hub_id").read_text().split() == [second, commit]


def test_an_interrupted_download_of_the_same_commit_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.broken = "model.safetensors"
    with pytest.raises(ModelError, match="did not finish"):
        fetch("owner/name", tmp_path / "models")
    (kept,) = (tmp_path / "models").rglob("tokenizer.json")
    before = kept.stat().st_ino
    hub.broken = ""
    assert (fetch("owner/name", tmp_path / "models") / "tokenizer.json").stat().st_ino == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_corrupt_file_is_noticed_and_fetched_again(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.spoilt = name
    with pytest.raises(ModelError, match="differs from the Hub's") as caught:
        fetch("owner/name", tmp_path / "models")
    assert name in caught.value.where
    assert not (tmp_path / "models" / "name").exists()
    hub.spoilt = ""
    assert (fetch("owner/name", tmp_path / "models") / name).read_bytes() == hub.commits["owner/name"][0][name]


def test_a_file_that_a_dying_machine_cut_short_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.broken = "model.safetensors"
    with pytest.raises(ModelError, match="did not finish"):
        fetch("owner/name", tmp_path / "models")
    (cut,) = (tmp_path / "models").rglob("tokenizer.json")
    cut.write_bytes(cut.read_bytes()[:-9])
    hub.broken = ""
    with pytest.raises(ModelError, match="differs from the Hub's"):
        fetch("owner/name", tmp_path / "models")
    assert fetch("owner/name", tmp_path / "models") == tmp_path / "models" / "name"


def test_a_small_disk_is_told_before(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.plan.hub.SPARE_BYTES", 2**60)
    with pytest.raises(DiskFullError, match="no room"):
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
    from huggingface_hub.errors import GatedRepoError

    refusal = GatedRepoError("401", response=Mock(headers={}))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", Mock(side_effect=refusal))
    with pytest.raises(ModelError, match=r"gated models: \S+ -m huggingface_hub\.cli\.hf auth login"):
        fetch("owner/name", tmp_path)
    assert subprocess.run([*shlex.split(HF_AUTH), "login", "--help"], capture_output=True, check=False).returncode == 0


def test_data_on_the_hub_is_fetched_once_and_its_folder_written_into_params(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("model:\n  path: m\ndata:\n  path: d # mine\n")
    for source, model in (("hub:owner/rows", "hub:owner/name"), ("datasets/owner/rows", "models/name")):
        said = CliRunner().invoke(app, ["run", "--data", source, "--model", model]).stdout
        has = "params.yaml: model.path is models/name\nparams.yaml: data.path is data/rows\n"
        assert (has if source.startswith("hub:") else "has these values already") in said
        assert "path: data/rows # mine" in (tmp_path / "params.yaml").read_text()
        assert (tmp_path / "data/rows/.hub_id").read_text().split()[0] == "datasets/owner/rows"
        hub.commits.pop("datasets/owner/rows", None)
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
    with pytest.raises(ConfigError, match=r"not logged in[^$]*do: +\S+ -m huggingface_hub\.cli\.hf auth login"):
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
    with pytest.raises(ModelError, match=r"The upload failed: 403 Forbidden[^$]*\.hf auth whoami"):
        CliRunner().invoke(app, ["push", "me/tuned", "--yes"], catch_exceptions=False)

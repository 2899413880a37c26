"""A project without a clone: what init makes, what update renews, and the wheel that both come from."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError
from safetrain.core.params_file import with_value
from safetrain.core.records.evaluation import Evaluation
from safetrain.core.records.metrics import TrainingSummary
from safetrain.core.records.settings import Recommendation
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_record, read_result, write_json, write_record
from safetrain.project import (
    PROGRAM,
    Program,
    make_project,
    pipeline_text,
    project_files,
    require_current,
    stage_hashes,
    update_project,
)
from safetrain.watch.result import describe_result
from safetrain.watch.run_folder import read_run
from tests.conftest import ROOT

MOST_FILES = 14
MOST_BYTES = 3_000_000  # of the wheel and of the source distribution
TRAINS = ("recommend_config", "train", "evaluate")
OURS = ("safetrain/", "stages/")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of somebody without Git settings."""
    folder = tmp_path_factory.mktemp("made") / "mine"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOME", str(folder.parent))
        patched.setenv("GIT_CONFIG_NOSYSTEM", "1")
        done = CliRunner().invoke(app, ["init", str(folder)])
    assert done.exit_code == 0, done.output
    assert f"Next:  cd {folder}" in done.stdout.replace("\n", "")
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "mine", symlinks=True))


def test_it_has_few_files_which_are_committed(project: Path) -> None:
    """By `safetrain init`."""
    listed = git(project, "ls-files").splitlines()
    assert len(listed) <= MOST_FILES
    assert {"params.yaml", "dvc.yaml", "README.md"} <= set(listed)
    assert git(project, "status", "--porcelain") == ""


def test_its_pipeline_is_the_programs_own() -> None:
    ours = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    theirs = yaml.safe_load(pipeline_text())
    assert list(theirs["stages"]) == list(ours["stages"])
    for name, stage in ours["stages"].items():
        own = theirs["stages"][name]
        assert own["cmd"] == f"safetrain stage {name}"
        assert own["deps"] == [dep for dep in stage["deps"] if not dep.startswith(OURS)]
        assert own["params"] == [{str(PROGRAM): [f"stages.{name}"]}, *stage.get("params", [])]
        rest = stage.keys() - {"cmd", "deps", "params"}
        assert {key: own[key] for key in rest} == {key: stage[key] for key in rest}
    assert {key: theirs[key] for key in ("metrics", "plots")} == {key: ours[key] for key in ("metrics", "plots")}


def test_a_folder_with_a_project_is_left_as_it_is(project: Path) -> None:
    before = (project / "params.yaml").read_text()
    with pytest.raises(ConfigError, match=r"already exists\.(.|\n)*to update a project: safetrain update"):
        make_project(project, example=True)
    assert (project / "params.yaml").read_text() == before
    (other := project.parent / "other").mkdir()
    for name in ("README.md", "dvc.yaml"):
        (other / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"dvc\.yaml already exists"):
        make_project(other, example=False)
    assert sorted(path.name for path in other.iterdir()) == ["README.md", "dvc.yaml"]
    (other / "dvc.yaml").unlink()
    make_project(other, example=False)
    assert (other / "README.md").read_text() == "mine"


def test_another_programs_project_asks_for_an_update(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    require_current()
    made = read_record(project / PROGRAM, Program)
    other = {**made.stages, "train": "0" * 16}
    write_record(project / PROGRAM, Program("0.0.1", made.example, other, made.files))
    with pytest.raises(ConfigError, match=r"made by safetrain 0\.0\.1"):
        require_current()
    assert update_project() == ["the next run repeats: train"]
    require_current()


def test_update_renews_what_is_untouched_and_leaves_the_rest(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "README.md").write_text("my own")
    params = with_value((project / "params.yaml").read_text(), "train.seed", 7)
    params = params.replace("  least_score: null ", "  least_exact_match: 0.5 ")  # as an earlier version called it
    (project / "params.yaml").write_text(params)
    monkeypatch.chdir(project)
    same = CliRunner().invoke(app, ["update"])
    assert (same.exit_code, same.stdout) == (0, "The project is up to date.\n")

    newer = project_files(example=False)
    newer |= {"README.md": "# Newer\n", "dvc.yaml": newer["dvc.yaml"] + "# newer\n"}
    newer["params.yaml"] = newer["params.yaml"].replace("  trace: none", "  added: 1 # new\n  tracing: none")
    monkeypatch.setattr("safetrain.project.project_files", lambda example: dict(newer))
    lines = update_project()
    assert "dvc.yaml: updated" in lines
    assert (project / "dvc.yaml").read_text().endswith("# newer\n")
    assert (project / "README.md").read_text() == "my own"
    assert (project / "README.md.new").read_text() == "# Newer\n"
    changed = "README.md: you have changed it; to take the new version: mv README.md.new README.md"
    assert {changed, "-my own", "+# Newer"} <= set(lines)
    assert "+  added: 1 # new" in lines
    merged = yaml.safe_load((project / "params.yaml.new").read_text())
    assert (merged["train"]["seed"], merged["train"]["added"], merged["gate"]["least_score"]) == (7, 1, 0.5)
    assert update_project() == []


@pytest.mark.parametrize(("path", "kind"), [
    (paths.RECOMMENDED_CONFIG, Recommendation), (paths.SUMMARY, TrainingSummary), (paths.EVALUATION, Evaluation)
])  # fmt: skip
def test_a_record_of_another_version_is_named_with_what_writes_it_again(
    project: Path, monkeypatch: pytest.MonkeyPatch, path: Path, kind: type[object]
) -> None:
    monkeypatch.chdir(project)
    write_json(path, {"batch_size": 4})
    said = rf"{path.name}(.|\n)*another version of safetrain: it has no \w+(.|\n)*run 'safetrain update', then"
    with pytest.raises(ConfigError, match=said):
        read_result(path, kind)
    if kind is not Recommendation:
        with pytest.raises(ConfigError, match=said):
            describe_result(read_run())
    shutil.rmtree(project / ".safetrain")  # a clone has no update: its code is new, so DVC repeats the stages
    with pytest.raises(ConfigError, match="run 'safetrain run'"):
        read_result(path, kind)


def test_the_wheel_has_the_program_makes_a_project_and_hashes_what_decides_a_result(tmp_path: Path) -> None:
    wheel = made_wheel(tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.glob("safetrain-0.1.0*") if path.is_file()]
    assert len(sizes) == 2
    assert max(sizes) < MOST_BYTES
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in wheel.glob("*/project/models/*/*")}
    names = [path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()]
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs", "tools"))]
    assert {name.partition("/")[0] for name in names} == {"safetrain", "safetrain-0.1.0.dist-info"}
    missing = {file.relative_to(ROOT).as_posix() for file in (ROOT / "safetrain").rglob("*.py")} - set(names)
    assert not missing
    rows = tmp_path / "my rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a"}) + "\n")
    folder = tmp_path / "with spaces"
    folder.mkdir()
    model = ROOT / "models/encyclopedia-3m"
    program = wheel.parents[2] / "bin/safetrain"  # without -W error, which libraries of DVC do not pass
    done = done_by(program, folder, "run", "--data", str(rows), "--model", str(model))
    assert "Made a project in" in done.stdout
    assert yaml.safe_load((folder / "params.yaml").read_text())["data"]["path"] == str(rows)
    assert done.returncode == 3, done.stderr  # the row has no answer
    assert "my rows.jsonl" in done.stderr
    assert done_by(program, folder, "--version").stdout == "safetrain 0.1.0\n"
    assert done_by(program, folder, "init", "my demo", "--example").returncode == 0
    assert done_by(program, folder / "my demo", "validate").returncode == 0
    hashes = hashes_in(wheel)
    assert hashes == stage_hashes()  # in the repository and installed
    for text, repeated in (("\n\n# a comment\n", set[str]()), ("\nWORDS = 1\n", {*TRAINS, "plot"})):
        for name in ("engine/loss.py", "watch/charts.py", "guard/verdict.py"):  # the last decides no result
            with (wheel / "safetrain" / name).open("a") as file:
                file.write(text)
        before, hashes = hashes, hashes_in(wheel)
        assert {name for name in hashes if hashes[name] != before[name]} == repeated


def test_windows_is_refused_in_a_sentence() -> None:
    code = "import sys; sys.platform = 'win32'; import safetrain"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "WSL" in done.stderr, "Traceback" in done.stderr) == (1, True, False)


def made_wheel(folder: Path) -> Path:
    """The site-packages of an environment with the wheel that the source distribution of this repository makes."""
    copy, env = folder / "source", folder / "with a space" / "env"
    listed = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in listed:
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/", "docs/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-c", "from setuptools import build_meta; print(build_meta.build_sdist('..'))"]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    shutil.unpack_archive(next(folder.glob("*.tar.gz")), folder, filter="data")
    command[-1] = command[-1].replace("sdist", "wheel")
    subprocess.run(command, cwd=folder / "safetrain-0.1.0", check=True, capture_output=True)
    shutil.rmtree(folder / "safetrain-0.1.0")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    pip, options = [sys.executable, "-m", "pip", f"--python={env}"], ["--no-deps", "--no-index", "--no-compile", "-q"]
    subprocess.run([*pip, "install", *options, next(folder.glob("*.whl"))], check=True)
    return next(env.glob("lib/python*/site-packages"))


def hashes_in(wheel: Path) -> dict[str, str]:
    """What the program in this folder says of its stages."""
    code = "import json; from safetrain.project import stage_hashes; print(json.dumps(stage_hashes()))"
    hashes: dict[str, str] = json.loads(python(wheel, wheel.parent, "-c", code).stdout)
    return hashes


def safetrain(wheel: Path, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """A command of the installed program."""
    return python(wheel, folder, "-m", "safetrain.cli", *words)


def python(wheel: Path, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Python with the installed program before all else."""
    return done_by(Path(sys.executable), folder, "-W", "error", *words, PYTHONPATH=str(wheel))


def done_by(program: Path, folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A program, with the packages that are installed here, for somebody with a home of their own."""
    home = str(folder.parent)
    own = {"PYTHONPATH": sysconfig.get_path("purelib"), "HOME": home, "SAFETRAIN_LOCK_DIR": home, **variables}
    command = [str(program), *words]
    return subprocess.run(command, cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, check=False)


def git(folder: Path, *words: str) -> str:
    """What Git prints."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout

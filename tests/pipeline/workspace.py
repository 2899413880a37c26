"""A temporary clone of the working tree with a home of its own, in which tests run the real commands."""

import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.formatting import RUN
from safetrain.core.params_file import with_value
from tests.conftest import BLAS_THREADS, ROOT
from tests.support.random_models import TINY, build_model

STAGES = ("validate_data", "preflight", "recommend_config", "train", "evaluate", "plot")
TINY_PATHS = {"model.path": "models/tiny", "data.path": "data/tiny"}  # where it does not matter what is learnt
SMALL = tuple(f"{key}={path}" for key, path in TINY_PATHS.items())
ROWS = {"train": 160, "valid": 20, "test": 20}
TIMEOUT_SECONDS = 900  # nothing here takes a fifth of that; a machine may have other things to do


class Workspace:
    """A Git repository with what this one would commit now, and the environment to run its commands in."""

    def __init__(self, parent: Path) -> None:
        self.folder, home = parent / "clone", parent / "home"
        home.mkdir()
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        for name in listed.decode().split("\0"):
            source = ROOT / name
            if name and source.is_file() and name != "dvc.lock":
                target = self.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
                if source.name == "__init__.py" and (compiled := source.parent / "__pycache__").is_dir():
                    shutil.copytree(compiled, target.parent / "__pycache__")  # by the same times, which copy2 keeps
        kept = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SAFETRAIN_CACHE_DIR", *BLAS_THREADS)
        self.environment = {name: os.environ[name] for name in kept if name in os.environ}
        self.environment |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{self.environment['PATH']}",
            "HOME": str(home),
            "SAFETRAIN_LOCK_DIR": str(home),
            "MPLCONFIGDIR": os.environ["SAFETRAIN_CACHE_DIR"],  # or each would look at every font anew
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        self.git("init", "-q", "-b", "main")
        self.git("config", "user.name", "Test")
        self.git("config", "user.email", "test@localhost")
        self.commit("start")

    def set_values(self, values: Mapping[str, object]) -> None:
        """Write values into params.yaml, by ``section.key``."""
        params = self.folder / "params.yaml"
        text = params.read_text()
        for key, value in values.items():
            text = with_value(text, key, value)
        params.write_text(text)

    def make_small(self, **changes: Any) -> None:
        """Make what SMALL names: a tiny random model, and the first rows of the example."""
        build_model(self.folder / "models/tiny", **TINY, **changes)
        rows = self.folder / "data/tiny"
        rows.mkdir()
        for name, count in ROWS.items():
            lines = (self.folder / f"data/example/{name}.jsonl").read_text().splitlines(keepends=True)
            (rows / f"{name}.jsonl").write_text("".join(lines[:count]))

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, in the clone unless told otherwise."""
        return subprocess.run(
            command, cwd=cwd or self.folder, env=self.environment, capture_output=True, text=True, check=False,
            timeout=TIMEOUT_SECONDS,
        )  # fmt: skip

    def stage(self, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        """Run a stage to its end in this process, where the libraries are open already."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
            patched.chdir(self.folder)
            patched.setattr(sys, "argv", [f"stages/{name}.py", *overrides])
            with pytest.raises(SystemExit) as ended:
                importlib.import_module(f"stages.{name}").main()
        return subprocess.CompletedProcess(
            [name, *overrides], int(ended.value.code or 0), out.getvalue(), err.getvalue()
        )

    def pipeline(self, *overrides: str) -> str:
        """What all stages and then `result` print, as `safetrain run` starts them, in this process."""
        said = ""
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(RUN, "safetrain run")
            for name in STAGES:
                done = self.stage(name, *overrides)
                assert done.returncode == 0, f"{name}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
                said += done.stdout
            return said + self.cli("result")

    def cli(self, *words: str, lines: str | None = None) -> str:
        """What a command of safetrain that succeeds prints, in this process."""
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(self.folder)
            done = CliRunner().invoke(app, list(words), input=lines, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command and leave it running."""
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def succeed(self, *command: str) -> str:
        """Run a command that must succeed; returns what it printed."""
        done = self.run(*command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    def git(self, *arguments: str) -> str:
        """A Git command."""
        return self.succeed("git", *arguments)

    def commit(self, message: str) -> None:
        """Commit everything that Git does not ignore."""
        self.git("add", "-A")
        self.git("commit", "-qm", message)

    def json(self, name: str) -> dict[str, Any]:
        """A file of checkpoints_qlora."""
        return json.loads((self.folder / "checkpoints_qlora" / name).read_text())

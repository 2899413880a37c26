"""A project folder of safetrain in which a case runs the stages, and what these left there."""

import atexit
import csv
import functools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.support.random_models import EMBEDDED, TINY, build_model

ROOT = Path(__file__).resolve().parents[3]
POSITIONS = 2048
Rows = Sequence[dict[str, Any] | str]
DEADLINE_SECONDS = 120


@dataclass(frozen=True)
class Done:
    """How a stage ended."""

    code: int
    out: str
    err: str
    calls: list[tuple[int, int, bool]]  # of the model in training: rows, tokens, whether to compile a graph
    class_is_changed: bool  # whether the blocks' class is another one than before


class Project:
    """A folder with params.yaml, conf/ and data; ``plan`` first, then ``train`` as often as wanted."""

    def __init__(self, name: str, train: Rows, valid: Rows = (), model: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=scratch(), prefix=f"{name}-"))
        shutil.copytree(ROOT / "conf", self.folder / "conf")
        shutil.copy(ROOT / "params.yaml", self.folder)
        self.data = write_rows(self.folder / "rows", train, valid or train[:2])
        self.output = self.folder / "checkpoints_qlora"
        self._paths = [f"model.path={model or tiny_model()}", f"data.path={self.data}"]

    def stage(self, name: str, *overrides: str, file_limit: int | None = None) -> Done:
        """Run a stage to its end, whatever that is."""
        return server().ask(self.folder, name, [*self._paths, *overrides], file_limit)

    def plan(self, *overrides: str) -> None:
        """Everything before training."""
        self.output.mkdir(exist_ok=True)
        (self.output / "machine.json").write_text(machine())
        for name in ("validate_data", "recommend_config"):
            done = self.stage(name, *overrides)
            if done.code:
                raise RuntimeError(f"{name}: {done.err}")

    def train(self, *overrides: str) -> Done:
        """Train; must succeed."""
        done = self.stage("train", *overrides)
        if done.code:
            raise RuntimeError(f"train: {done.err}")
        return done

    def kill_training(self, signal_number: int, after_records: int, *overrides: str) -> int:
        """Train in a process of its own and send it a signal after some records; returns how it ended."""
        command = [sys.executable, "-m", "stages.train", *self._paths, *overrides]
        metrics = self.output / "training_metrics.csv"
        metrics.unlink(missing_ok=True)
        child = subprocess.Popen(
            command, cwd=self.folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        began = time.monotonic()
        while child.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") <= after_records):
            if time.monotonic() - began > DEADLINE_SECONDS:
                child.kill()
            time.sleep(0.002)
        if child.poll() is None:
            child.send_signal(signal_number)
        return child.wait(timeout=DEADLINE_SECONDS)

    def summary(self) -> dict[str, Any]:
        """training_summary.json."""
        return json.loads((self.output / "training_summary.json").read_text())

    def column(self, name: str) -> list[float]:
        """The measured values of a column of training_metrics.csv."""
        with (self.output / "training_metrics.csv").open() as file:
            return [float(row[name]) for row in csv.DictReader(file) if row[name]]

    def adapter(self) -> dict[str, np.ndarray]:
        """The adapter that was kept."""
        return weights(self.output / "adapters" / "adapters.safetensors")


class Server:
    """The process that runs the stages."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faults.server"],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def ask(self, folder: Path, stage: str, overrides: list[str], file_limit: int | None) -> Done:
        """Have one stage run."""
        request = {"folder": str(folder), "stage": stage, "overrides": overrides, "file_limit": file_limit}
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the server has no pipes")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that runs the stages ended in {stage}")
        value = json.loads(line)
        return Done(**{**value, "calls": [(rows, tokens, traced) for rows, tokens, traced in value["calls"]]})

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None and self._process.stdout is not None:
            self._process.stdin.close()
            self._process.stdout.close()
        self._process.wait(timeout=DEADLINE_SECONDS)


@functools.cache
def server() -> Server:
    """Started when the first stage is asked for."""
    return Server()


@functools.cache
def scratch() -> Path:
    """Where everything is written; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="safetrain-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def environment() -> dict[str, str]:
    """The code of this working tree, and a lock that waits for nobody's training."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "SAFETRAIN_LOCK_DIR": str(scratch())}


@functools.cache
def tiny_model(bits: int | None = None, vocabulary: int = 2048) -> Path:
    """A random Llama of two layers with the embedded model's tokenizer and room for long rows."""
    changes = {**TINY, "vocab_size": vocabulary, "max_position_embeddings": POSITIONS}
    folder = build_model(scratch() / f"model-{bits}-{vocabulary}", bits=bits, **changes)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": POSITIONS}))
    return folder


@functools.cache
def machine() -> str:
    """machine.json of this machine: preflight runs once, and every project takes its result."""
    project = Project("machine", [chat(str(i), str(i)) for i in range(3)], model=EMBEDDED)
    for name in ("validate_data", "preflight"):
        done = project.stage(name)
        if done.code:
            raise RuntimeError(f"{name}: {done.out}{done.err}")
    return (project.output / "machine.json").read_text()


def chat(question: str, answer: str) -> dict[str, Any]:
    """A chat row."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(folder: Path, train: Rows, valid: Rows) -> Path:
    """A data folder; a string is written as it stands. The test file asks what nothing else does."""
    folder.mkdir(parents=True)
    test = [chat(f"held out {number}", "nothing") for number in range(2)]
    for name, rows in (("train", train), ("valid", valid), ("test", test)):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def weights(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file."""
    loaded = mx.load(str(file))
    if not isinstance(loaded, dict):
        raise RuntimeError(f"{file} holds no named arrays")
    return {name: np.array(value) for name, value in loaded.items()}


def distance(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> float:
    """Euclidean distance of two adapters."""
    return math.sqrt(sum(float(np.square(one[name] - two[name], dtype=np.float64).sum()) for name in one))


def norm(adapter: dict[str, np.ndarray]) -> float:
    """Euclidean norm."""
    return math.sqrt(sum(float(np.square(value, dtype=np.float64).sum()) for value in adapter.values()))


def is_finite(adapter: dict[str, np.ndarray]) -> bool:
    """Whether every weight is a number."""
    return all(bool(np.isfinite(value).all()) for value in adapter.values())

"""A scratch project with a tiny random model and tiny data, in which trainings are started, hit and compared."""

import csv
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from safetrain.core.records.run_state import discard_run
from tests.support.random_models import TINY, build_model

ROOT = Path(__file__).resolve().parents[3]
INJECT = Path(__file__).resolve().parent / "inject"
CODE = ("safetrain", "stages", "conf", "params.yaml", "dvc.yaml", ".dvc/config", ".dvcignore", ".gitignore")
UPDATES, SAVE_STEPS, EVAL_STEPS = 24, 3, 4
TRAIN: dict[str, Any] = {
    "batch_size": 2, "gradient_accumulation": 2, "num_epochs": 8, "max_steps": UPDATES, "save_steps": SAVE_STEPS,
    "eval_steps": EVAL_STEPS, "log_steps": 1, "learning_rate": 1e-3,
}  # fmt: skip
LORA: dict[str, Any] = {"rank": 4, "dropout": 0.0}  # dropout draws by micro-batch
TIMED = ("labels_per_second", "peak_memory_bytes", "footprint_bytes", "elapsed_seconds")
DEADLINE_SECONDS = 180.0
Fingerprint = tuple[str, str, str]
LEFT_SECONDS = 5.0  # after which nothing of a killed run may be left


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int  # negative: a signal
    out: str  # stdout and stderr together

    @property
    def continued_from(self) -> int | None:
        """The step that the (first) training process of it continued from; None if it never got so far."""
        if found := re.search(r"^continuing from step (\d+)$", self.out, re.MULTILINE):
            return int(found[1])
        return 0 if re.search(r"^training on \d+ row", self.out, re.MULTILINE) else None

    @property
    def last_line(self) -> str:
        """Of what it printed."""
        return next((line.strip() for line in reversed(self.out.splitlines()) if line.strip()), "nothing printed")


class Project:
    """A folder with the code as it is now, params.yaml with pins, a model, rows, and an environment of its own."""

    def __init__(
        self, parent: Path, *, train: dict[str, Any] | None = None, rows: Sequence[dict[str, Any]] = (),
        model: dict[str, Any] | None = None, cache: Path | None = None,
    ) -> None:  # fmt: skip
        """``cache``: of what is measured; a new one where none is given."""
        self.parent, self.folder = parent, parent / "project"
        self.output = self.folder / "checkpoints_qlora"
        self.flight = self.output / "flight"
        self.truth = parent / "truth.json"  # what the injection writes down before it acts
        self._printed = parent / "printed.txt"
        parent.mkdir(parents=True, exist_ok=True)
        for name in CODE:
            copy(ROOT / name, self.folder / name)
        build_model(self.folder / "models" / "tiny", **{"bits": 4, **TINY, **(model or {})})
        write_rows(self.folder / "data" / "tiny", rows or sums())
        self.pin(train=TRAIN | (train or {}), lora=LORA, model={"path": "models/tiny"}, data={"path": "data/tiny"})
        home, scratch = parent / "home", parent / "tmp"
        home.mkdir()
        scratch.mkdir()
        kept = {
            name: os.environ[name]
            for name in ("LANG", "LC_ALL", "OPENBLAS_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT")
            if name in os.environ
        }
        self.environment = kept | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home), "TMPDIR": str(scratch), "SAFETRAIN_LOCK_DIR": str(home), "GIT_CONFIG_NOSYSTEM": "1",
            "SAFETRAIN_CACHE_DIR": str(cache or home / "cache"),
            "PYTHONPATH": os.pathsep.join([str(INJECT), str(self.folder)]),
        }  # fmt: skip

    def pin(self, **sections: dict[str, Any]) -> None:
        """Set keys of params.yaml."""
        path = self.folder / "params.yaml"
        value = yaml.safe_load(path.read_text())
        for section, pins in sections.items():
            value[section] |= pins
        path.write_text(yaml.safe_dump(value))

    def plan(self) -> None:
        """Everything before training."""
        for name in ("validate_data", "preflight", "recommend_config"):
            self.succeed(sys.executable, "-m", f"stages.{name}")

    def succeed(self, *command: str) -> str:
        """Run a command that must succeed; returns what it printed."""
        done = self.finish(self.start(*command))
        if done.code:
            raise RuntimeError(f"{' '.join(command)} ended with {done.code}: {done.out[-3000:]}")
        return done.out

    def start(self, *command: str, plan: dict[str, Any] | None = None) -> subprocess.Popen[bytes]:
        """Start a command in the project; what it prints goes to a file."""
        environment = self.environment | ({"CHAOS_PLAN": json.dumps(plan)} if plan else {})
        with self._printed.open("wb") as out:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def discard(self) -> None:
        """Forget a run that was interrupted."""
        discard_run(self.output, damaged_too=True)

    def start_training(
        self, *overrides: str, plan: dict[str, Any] | None = None, anew: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start the stage, hit as planned; ``anew``: not where an interrupted run is."""
        if anew:
            self.discard()
        self.truth.unlink(missing_ok=True)
        full = {"truth": str(self.truth), **plan} if plan else None
        return self.start(sys.executable, "-m", "stages.train", *overrides, plan=full)

    def wait_until_hit(self, process: subprocess.Popen[bytes]) -> None:
        """Until the injection has written the truth, or the training has ended without it."""
        wait_for(lambda: self.truth.is_file() or process.poll() is not None, "the training gets there")

    def finish(self, process: subprocess.Popen[bytes]) -> Done:
        """Wait for the end of a command."""
        try:
            code = process.wait(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            end(process.pid)
            code = process.wait()
        return Done(code, self.printed())

    def train(self, *overrides: str, plan: dict[str, Any] | None = None, anew: bool = False) -> Done:
        """Run the stage to its end, whatever that is."""
        return self.finish(self.start_training(*overrides, plan=plan, anew=anew))

    def printed(self) -> str:
        """What the last command has printed so far."""
        return self._printed.read_text(errors="replace")

    def json(self, name: str) -> dict[str, Any]:
        """A file of the output folder; empty if it is not there."""
        path = self.output / name
        return json.loads(path.read_text()) if path.is_file() else {}

    def read_truth(self) -> dict[str, Any] | None:
        """What was really going on when it was hit; None if it was not."""
        return json.loads(self.truth.read_text()) if self.truth.is_file() else None

    def fingerprint(self) -> Fingerprint:
        """What the finished training left, as hashes: nothing in it depends on time, speed or memory.

        The adapter; the tensors of the newest checkpoint; the metrics without what is measured with a clock.
        """
        folder = self.checkpoints()[0]
        arrays = [tensors(folder / f"{name}.safetensors") for name in ("adapters", "optimizer", "best")]
        files = [self.output / "adapters" / name for name in ("adapters.safetensors", "adapter_config.json")]
        with (self.output / "training_metrics.csv").open() as file:
            table = [[value for key, value in row.items() if key not in TIMED] for row in csv.DictReader(file)]
        final = (self.output / "training_metrics.json").read_bytes()
        final += repr(self.json("training_summary.json")["proof"]).encode()
        adapter = b"".join(path.read_bytes() for path in files)
        return digest(adapter), digest(repr(arrays).encode()), digest(repr(table).encode() + final)

    def checkpoints(self) -> list[Path]:
        """The folders, the newest first."""
        return sorted(self.output.glob("checkpoint_epoch_*_step_*"), key=lambda folder: -step_of(folder))


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name.rpartition("_")[2])


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is removed at the end, with no process left that works in it."""
    with tempfile.TemporaryDirectory(prefix="safetrain-chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        try:
            yield folder
        finally:
            for process in processes_in(folder):
                end(process.pid)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Those at work below a folder; one that is dead and not collected is not at work."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.pid != os.getpid() and Path(process.cwd()).is_relative_to(folder):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def left_over(folder: Path) -> list[str]:
    """Command lines of what still works in a folder after a few seconds."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (found := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [" ".join(process.cmdline()) for process in found if process.is_running()]


def end(pid: int) -> None:
    """Kill a process and all below it."""
    try:
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            each.send_signal(signal.SIGKILL)
    except psutil.Error:
        pass  # it has ended


def wait_for(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Poll until ``condition()`` is true; raises RuntimeError when that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {seconds:.0f} s in vain: {what}")
        time.sleep(0.005)


def tensors(file: Path) -> list[tuple[str, str, list[int], str]]:
    """Name, type, shape and hash of each array of a safetensors file, by name."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = []
    for name, value in sorted(header.items()):
        first, last = value["data_offsets"]
        found.append((name, value["dtype"], value["shape"], digest(content[start + first : start + last])))
    return found


def digest(content: bytes) -> str:
    """A short hash."""
    return hashlib.sha256(content).hexdigest()[:16]


def sums() -> list[dict[str, Any]]:
    """Rows of different lengths, each another sum."""
    pairs = [(a, b) for a in range(6) for b in range(4)]
    return [chat(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}. " * (1 + b)) for a, b in pairs]


def chat(question: str, answer: str) -> dict[str, Any]:
    """A chat row."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A data folder; validation and test have the first few rows with other words."""
    folder.mkdir(parents=True)
    few = [_held_out(row) for row in rows[:6]]
    for name, kept in (("train", rows), ("valid", few), ("test", few)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept))


def _held_out(row: dict[str, Any]) -> dict[str, Any]:
    """The row as another question: validation refuses a test that asks what train asks."""
    if "prompt" in row:
        return {**row, "prompt": f"held out: {row['prompt']}"}
    other = json.loads(json.dumps(row).replace("What is", "How much is"))
    if other == row:
        other["messages"][0]["content"] = f"held out: {row['messages'][0]['content']}"
    return other


def copy(source: Path, target: Path) -> None:
    """A file or folder, without what Python compiled."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    elif source.is_file():
        shutil.copy(source, target)

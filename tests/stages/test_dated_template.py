"""A chat template that writes today's date: an interrupted run is continued on another day, bit for bit."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.pipeline.workspace import SMALL, Workspace

CLOCK = """
import datetime, os
class Date(datetime.date):
    @classmethod
    def today(cls):
        return datetime.date.fromisoformat(os.environ["TODAY"])
datetime.date = Date
"""
DATED = (
    "{{ '<|system|>' + strftime_now('%d %B %Y') + '<|end|>' }}{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SETTINGS = (
    *SMALL, "train.max_steps=200", "train.num_epochs=20", "train.save_steps=50", "train.eval_steps=50",
    "train.log_steps=1", "train.max_examples=48", "train.batch_size=4", "train.gradient_accumulation=1",
    "train.learning_rate=1e-3", "lora.dropout=0.1",
)  # fmt: skip


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path)
    made.make_small()
    file = made.folder / "models/tiny/tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": DATED}))
    clock = tmp_path / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(CLOCK)
    made.environment["PYTHONPATH"] = str(clock)
    return made


def set_day(workspace: Workspace, day: str) -> None:
    workspace.environment["TODAY"] = day


def plan(workspace: Workspace) -> None:
    """Up to the training."""
    for stage in ("validate_data", "preflight", "recommend_config"):
        workspace.succeed("python", "-m", f"stages.{stage}", *SETTINGS, "preflight.level=quick")


def test_a_run_that_was_stopped_is_continued_the_next_day(workspace: Workspace) -> None:
    set_day(workspace, "2026-01-31")
    plan(workspace)
    assert workspace.json("data_report.json")["template_date"] == "2026-01-31"
    train = ("python", "-m", "stages.train", *SETTINGS)
    workspace.succeed(*train)
    adapter = workspace.folder / "checkpoints_qlora/adapters/adapters.safetensors"
    unbroken = adapter.read_bytes()

    metrics = workspace.folder / "checkpoints_qlora/training_metrics.csv"
    metrics.unlink()  # what is waited for below is the second run's
    first = workspace.start(*train, "train.restart=true")
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 4:
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 130

    set_day(workspace, "2026-02-01")
    plan(workspace)
    assert workspace.json("data_report.json")["template_date"] == "2026-01-31"
    assert "continuing from step" in workspace.succeed(*train)
    assert adapter.read_bytes() == unbroken

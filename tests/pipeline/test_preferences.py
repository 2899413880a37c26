"""The whole pipeline on pairs of answers: what run, result, monitor, report and card say about them."""

import contextlib
import math
import shutil

import pytest

from safetrain.core.records.metrics import parse_csv
from safetrain.core.storage import paths
from safetrain.engine.training import OF_PAIRS
from safetrain.watch.result import write_card
from safetrain.watch.run_folder import read_run
from tests.conftest import EMBEDDED
from tests.pipeline.workspace import Workspace

TRAIN = (
    f"model.path={EMBEDDED}", "data.path=data/pairs.jsonl", "preflight.level=quick",
    "train.num_epochs=1", "train.eval_steps=3", "evaluate.max_examples=2", "train.learning_rate=1e-3",
)  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("preferences"))
    lines = (made.folder / "data/preferences.jsonl").read_text().splitlines(keepends=True)
    (made.folder / "data/pairs.jsonl").write_text("".join(lines[:60]))
    return made


def test_a_run_on_pairs_counts_pairs_and_shows_which_answers_are_preferred(workspace: Workspace) -> None:
    said = workspace.pipeline(*TRAIN, "train.method=dpo")
    records = parse_csv((workspace.folder / "checkpoints_qlora/training_metrics.csv").read_text())
    first, last = records[0], next(each for each in reversed(records) if each.valid_accuracy is not None)
    summary, preference = workspace.json("training_summary.json"), workspace.json("evaluation.json")["preference"]
    assert first.valid_loss == pytest.approx(math.log(2), abs=1e-6)
    assert (first.valid_accuracy, last.step) == (0.0, summary["steps"])
    accuracy, margin, *_ = end = [getattr(last, name) for name in OF_PAIRS]
    moved = [after - getattr(first, name) for name, after in zip(OF_PAIRS, end, strict=True)]
    assert accuracy > 0.9
    assert 0 < margin == pytest.approx(0.1 * (moved[2] - moved[3]), rel=1e-3)
    pairs = summary["train_rows"] // 2
    assert preference["accuracy"] > 0.9
    assert [workspace.json("evaluation.json")[name]["perplexity"] for name in ("base", "tuned")] == [None, None]
    assert summary["peak_footprint_bytes"] >= max(record.footprint_bytes for record in records)
    for part in (
        f"training on {pairs} pairs: 16 x 1 rows per update (two rows are a pair), {summary['steps']} updates",
        f"enough for {pairs} pairs", "16 rows per update (8 pairs)", " · valid 0.6931 · accuracy 0.0 % · margin 0",
        f"Trained {summary['steps']} steps on {pairs} pairs, ", "nats per pair: better by", "train.beta=0.2",
    ):  # fmt: skip
        assert part in said, part
    assert "The chosen answer is preferred in " in workspace.cli("result")
    assert f"pairs: accuracy {100 * accuracy:.1f} %, margin " in workspace.cli("monitor", "--once", "--plain")
    page = (workspace.folder / "checkpoints_qlora/report.html").read_text()
    with contextlib.chdir(workspace.folder):
        write_card(paths.ADAPTERS, None, None, read_run())
        card = (paths.ADAPTERS / "README.md").read_text()
    for text in (page, card):
        assert f"{pairs} pairs, each seen once; " in text
        assert "labels trained; no row truncated" in text
    assert "loss on the test pairs, nats per pair" in card


def test_another_run_begins_with_the_adapter_of_the_last_one(workspace: Workspace) -> None:
    values = (*TRAIN, "train.method=dpo", "train.max_steps=2")
    first = workspace.json("evaluation.json")["preference"]
    done = workspace.stage("recommend_config", *values, "train.from_adapter=checkpoints_qlora/adapters")
    assert "train.from_adapter is in a folder that training replaces" in done.stderr
    shutil.copytree(workspace.folder / "checkpoints_qlora/adapters", workspace.folder / "adapters")
    done = workspace.stage("recommend_config", *values, "train.from_adapter=adapters", "lora.rank=4")
    assert "lora.rank is set with train.from_adapter, which has its own" in done.stderr
    said = workspace.pipeline(*values, "train.from_adapter=adapters")
    assert ", beginning with adapters; " in said
    second = workspace.json("evaluation.json")["preference"]
    assert 0 < second["margin"] < first["margin"], "compared with the adapter that it began with"
    assert workspace.json("training_summary.json")["base_valid_loss"] == pytest.approx(math.log(2), abs=1e-6)
    reasons, before = workspace.json("recommended_config.json")["reasons"], workspace.json("training_summary.json")
    assert reasons["lora.rank"] == "that of adapters"
    moved = (workspace.folder / "adapters").rename(workspace.folder / "moved")
    for stage in ("preflight", "recommend_config", "train"):
        assert workspace.stage(stage, *values, "train.from_adapter=moved").returncode == 0
    after = workspace.json("training_summary.json")
    assert after["best_valid_loss"] == before["best_valid_loss"]
    (moved / "adapters.safetensors").unlink()
    done = workspace.stage("preflight", *values, "train.from_adapter=moved")
    assert "The adapter has no adapters.safetensors" in done.stdout


def test_a_method_for_single_answers_refuses_pairs(workspace: Workspace) -> None:
    done = workspace.stage("recommend_config", *TRAIN, "train.method=lora")
    assert done.returncode == 2
    for part in ("train.method=lora cannot use this data", "set train.method to dpo or orpo, or use other data"):
        assert part in done.stderr

"""model.create: the first stage makes the model that is not there, of the training rows alone, and once."""

import shutil
from pathlib import Path

from safetrain.core.model.files import read_model_files
from safetrain.data.validate import training_texts
from safetrain.plan.creation.create import TokenizerOfText, create_model
from safetrain.plan.creation.shapes import ShapeRequest
from tests.corpora import tokenized, write_ds
from tests.pipeline.workspace import Workspace

STAGE = ("python", "-m", "stages.validate_data", "model.path=models/new", "data.path=data/tiny", "train.seed=7")


def test_the_first_stage_makes_the_model_that_is_not_there(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.make_small()
    missing = workspace.run(*STAGE)
    assert missing.returncode == 4
    assert "does not exist" in missing.stderr
    said = workspace.succeed(*STAGE, "model.create=10m")
    assert "created models/new: " in said
    assert "untrained" in said
    folder = workspace.folder / "models/new"
    before = read_model_files(folder).fingerprint
    again = workspace.succeed(*STAGE, "model.create=10m", "train.seed=8")
    assert "using the existing model models/new: 9," in again
    assert read_model_files(folder).fingerprint == before
    assert "to create one from this text (model.create=85m)" in workspace.succeed(*STAGE, "model.create=85m")

    shutil.rmtree(folder)
    rows = workspace.folder / "data/tiny/train.jsonl"
    create_model(folder, ShapeRequest(10_000_000), TokenizerOfText(training_texts([rows], None, print), "rows"), seed=7)
    assert read_model_files(folder).fingerprint == before


def test_for_a_corpus_of_tokens_the_command_that_makes_the_model_is_said(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_ds(workspace.folder / "corpus/train.ds", tokenized())
    done = workspace.run(
        "python", "-m", "stages.validate_data", "model.path=models/new", "data.path=corpus", "model.create=85m",
        "train.method=pretrain",
    )  # fmt: skip
    assert "safetrain create 85m models/new --tokenizer MODEL" in done.stderr

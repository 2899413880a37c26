"""A training from scratch through the first stage: a corpus of tokens, and model.create makes the model, once."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from safetrain.core.data.token_rows import TokenRows, TokenWindows
from safetrain.core.data.training_rows import load_training_rows
from safetrain.core.model.files import read_model_files
from safetrain.data.validate import training_texts
from safetrain.plan.create import create_model
from safetrain.plan.model_shape import preset
from tests.corpora import TEXTS, tokenized, write_ds
from tests.pipeline.workspace import Workspace

NEW = ("model.path=models/new", "data.path=data/tiny", "train.seed=7")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("scratch"))
    made.make_small()
    write_ds(made.folder / "data/corpus/00000_train.ds", tokenized())
    return made


def test_a_corpus_is_for_a_training_from_scratch_alone(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    done = workspace.stage("validate_data", "data.path=data/corpus")
    assert (done.returncode, "train.method=pretrain" in done.stderr) == (2, True)
    printed = workspace.stage("validate_data", "data.path=data/corpus", "train.method=pretrain").stdout
    assert "data/corpus: tokens of documents (datatrove)" in printed
    assert "stop token: <|end|>" in printed
    monkeypatch.chdir(workspace.folder)
    rows, documents = load_training_rows(Path("models/encyclopedia-3m"), None, 16, method="pretrain"), tokenized()
    assert isinstance(rows.train, TokenWindows)
    assert isinstance(rows.valid, TokenRows)
    assert np.isclose(rows.valid_label_bytes, sum(len(text) for text in TEXTS) / sum(map(len, documents)), rtol=0.02)
    assert rows.train.of_update([0]).data[0].ids.tolist() in [document[:17] for document in documents]
    new = ("model.path=models/none", "data.path=data/corpus", "model.create=85m", "train.method=pretrain")
    said = workspace.stage("validate_data", *new).stderr
    assert "safetrain create PRESET DIR --tokenizer MODEL" in said


def test_the_first_stage_makes_the_model_that_is_not_there(workspace: Workspace) -> None:
    missing = workspace.stage("validate_data", *NEW)
    assert (missing.returncode, "does not exist" in missing.stderr) == (4, True)
    said = workspace.stage("validate_data", *NEW, "model.create=10m").stdout
    assert ("created models/new: " in said, "untrained" in said) == (True, True)
    folder = workspace.folder / "models/new"
    before = read_model_files(folder).fingerprint
    again = workspace.stage("validate_data", *NEW, "model.create=85m", "train.seed=8").stdout
    assert "using the existing model models/new: 9," in again
    assert "to create one from this text (model.create=85m)" in again
    assert read_model_files(folder).fingerprint == before
    shutil.rmtree(folder)
    rows = workspace.folder / "data/tiny/train.jsonl"  # these alone
    create_model(folder, preset("10m"), 7, texts=training_texts([rows], None))
    assert read_model_files(folder).fingerprint == before

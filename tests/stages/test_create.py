"""A training from scratch through the first stage: a corpus of texts, and model.create makes the model, once."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from safetrain.core.data.token_rows import TokenRows, TokenWindows
from safetrain.core.data.training_rows import load_training_rows
from safetrain.core.model.files import read_model_files, tokenizer_hash
from safetrain.core.model.shapes import PRESETS
from safetrain.create.model import create_model
from safetrain.data.validate import training_texts
from tests.conftest import EMBEDDED
from tests.corpora import TEXTS, tokenized
from tests.pipeline.workspace import Workspace
from tests.support.random_models import TINY, build_model

NEW = ("model.path=models/new", "data.path=data/tiny", "train.seed=7")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("scratch"))
    made.make_small()
    (made.folder / "data/corpus").mkdir()
    (made.folder / "data/corpus/train.txt").write_text("\n<|endoftext|>\n".join(TEXTS))
    return made


def test_a_corpus_is_for_a_training_from_scratch_alone(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = ("data.path=data/corpus", "data.near_duplicate_similarity=1.0")  # only the numbers of the texts differ
    done = workspace.stage("validate_data", *corpus)
    assert (done.returncode, "no file named train" in done.stderr) == (3, True)
    printed = workspace.stage("validate_data", *corpus, "train.method=pretrain").stdout
    assert "data/corpus: text; " in printed
    assert "stop token: <|end|>\n" in printed
    monkeypatch.chdir(workspace.folder)
    documents, loaded = tokenized(), load_training_rows(Path("models/encyclopedia-3m"), None, "pretrain")
    rows, label_bytes = loaded.at_length(16, "pretrain"), 1 / (np.log(2) * loaded.bits_per_byte_of_nat)
    assert isinstance(rows.train, TokenWindows)
    assert isinstance(rows.valid, TokenRows)
    assert np.isclose(label_bytes, sum(len(text) for text in TEXTS) / sum(map(len, documents)), rtol=0.02)
    assert rows.train.of_update([0]).data[0].ids.tolist() in [document[:17] for document in documents]
    new = (*corpus, "model.path=models/none", "model.create=85m", "train.method=pretrain")
    created = workspace.stage("validate_data", *new, "model.tokenizer=models/encyclopedia-3m").stdout
    assert "created models/none: untrained, " in created
    assert tokenizer_hash(workspace.folder / "models/none") == tokenizer_hash(EMBEDDED)


def test_the_first_stage_makes_the_model_that_is_not_there(workspace: Workspace) -> None:
    missing = workspace.stage("validate_data", *NEW)
    assert (missing.returncode, "does not exist" in missing.stderr) == (4, True)
    said = workspace.stage("validate_data", *NEW, "model.create=10m").stdout
    assert ("created models/new: " in said, "untrained" in said) == (True, True)
    folder = workspace.folder / "models/new"
    before = read_model_files(folder).fingerprint
    again = workspace.stage("validate_data", *NEW, "model.create=85m", "train.seed=8").stdout
    assert "using the existing model models/new: 9," in again
    assert "to create a new one, remove this folder" in again
    assert read_model_files(folder).fingerprint == before
    shutil.rmtree(folder)
    rows = workspace.folder / "data/tiny/train.jsonl"  # these alone
    create_model(folder, PRESETS["10m"], 7, texts=training_texts([rows], None))
    assert read_model_files(folder).fingerprint == before


RUN = (
    "experiment=pretrain_10m", "model.path=models/tiny", "data.path=data/few", "train.max_seq_length=32",
    "train.batch_size=2", "train.max_steps=4", "train.warmup_steps=0", "train.eval_steps=2", "train.learning_rate=3e-3",
)  # fmt: skip


def test_documents_become_a_model_that_continues_them(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    build_model(workspace.folder / "models/tiny", **TINY)
    few = workspace.folder / "data/few"
    few.mkdir()
    for name, count in (("train", 40), ("valid", 4), ("test", 4)):
        lines = (workspace.folder / f"data/pretrain_example/{name}.jsonl").read_text().splitlines(keepends=True)
        (few / f"{name}.jsonl").write_text("".join(lines[:count]))
    said = workspace.pipeline(*RUN)
    assert "Trained 4 steps on " in said
    assert " windows, " in said
    assert " bits per byte of text." in said
    assert "Test loss " in said
    assert "adapter" not in said[said.index("Trained 4 steps") :]
    page = (workspace.folder / "checkpoints_qlora/report.html").read_text()
    assert "<h2>Answers</h2>" not in page, "documents ask nothing"
    assert workspace.cli("ask", "The atomic number of").startswith("The atomic number of")
    workspace.cli("fuse", "models/mine")
    assert "trained on documents only" in (workspace.folder / "models/mine/README.md").read_text()
    told = workspace.cli("chat", "--base", "--model", "models/mine", "--max-new-tokens", "2", lines="The\n")
    assert "was not trained on chats, so it continues each line" in told

"""A corpus of tokens through the stages: validated for a training from scratch, refused for any other."""

from pathlib import Path

import numpy as np
import pytest

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.data.training_rows import load_training_rows
from safetrain.core.data.windows import TokenWindows
from tests.corpora import TEXTS, tokenized, write_ds
from tests.pipeline.workspace import Workspace


def test_a_corpus_is_validated_for_a_training_from_scratch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path)
    documents = tokenized()
    write_ds(workspace.folder / "data/corpus/00000_train.ds", documents)
    validate = ("python", "-m", "stages.validate_data", "data.path=data/corpus")
    done = workspace.run(*validate)
    assert done.returncode == 2
    assert "train.method=pretrain" in done.stderr
    printed = workspace.succeed(*validate, "train.method=pretrain")
    assert "data/corpus: tokens of documents (datatrove)" in printed
    assert "end of a document: <|end|>" in printed
    assert "an answer" not in printed
    monkeypatch.chdir(workspace.folder)
    rows = load_training_rows(workspace.folder / "models/encyclopedia-3m", None, 16, method="pretrain")
    assert isinstance(rows.train, TokenWindows)
    assert isinstance(rows.valid, TokenRows)
    assert np.isclose(rows.valid_label_bytes, sum(len(text) for text in TEXTS) / sum(map(len, documents)), rtol=0.02)
    first = rows.train.of_update([0])
    assert first.data[0].ids.tolist() in [document[:17] for document in documents]

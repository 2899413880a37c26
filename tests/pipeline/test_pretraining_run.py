"""From documents to a model of its own: the stages with train.method=pretrain, and what is said at the end."""

from pathlib import Path

from tests.pipeline.workspace import Workspace
from tests.support.random_models import TINY, build_model

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
    said = workspace.succeed("safetrain", "run", *RUN)
    assert "Trained 4 steps on " in said
    assert " windows in " in said
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

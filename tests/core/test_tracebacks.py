"""What a library said before it was told in our words is kept whole, and never hides the error itself."""

from pathlib import Path

import pytest

from safetrain.core.errors import EngineError, ModelError, SafetrainError
from safetrain.core.storage.files import keep_text, with_traceback
from safetrain.core.storage.paths import ERROR, FLIGHT


def translated(*, understood: bool = False) -> SafetrainError:
    """An error of ours that stands for another one."""
    try:
        try:
            raise RuntimeError("[matmul] bad shape")
        except RuntimeError as error:
            raise EngineError("mlx failed at step 3") from (None if understood else error)
    except EngineError as told:
        return told


def test_the_traceback_is_written_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to a training, a command may fail: what it keeps leaves the training's own alone."""
    monkeypatch.setenv("SAFETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / ERROR
    assert with_traceback(translated()) == f"mlx failed at step 3\n  traceback: {kept}"
    assert (keep_text("of a child"), kept.read_text(encoding="utf-8")) == (str(kept), "of a child")
    told = with_traceback(translated(), tmp_path / FLIGHT)
    path = tmp_path / FLIGHT / ERROR
    assert told == f"mlx failed at step 3\n  traceback: {path}"
    text = path.read_text()
    assert "RuntimeError: [matmul] bad shape" in text
    assert 'test_tracebacks.py", line' in text
    assert "The above exception was the direct cause" in text


def test_an_error_that_is_understood_has_none(tmp_path: Path) -> None:
    ours = ModelError("The adapter does not fit.")
    ours.__cause__ = ModelError("One tensor is too many.")
    for error in (translated(understood=True), ModelError("There is no model."), ours):
        assert with_traceback(error, tmp_path) == str(error)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()  # and a disk that refuses hides no error
    assert with_traceback(translated(), tmp_path / "file") == "mlx failed at step 3"

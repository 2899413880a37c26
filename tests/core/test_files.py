"""A result is whole or absent, whatever happens while it is written."""

from pathlib import Path

import pytest

from safetrain.core.files import replace_directory, write_atomic, write_json


def test_a_failed_write_leaves_the_old_file_and_no_remains(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, fail)
    assert path.read_text() == '{\n  "old": 1\n}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    old, new = tmp_path / "final", tmp_path / "new"
    old.mkdir()
    (old / "stale").write_text("x")
    new.mkdir()
    (new / "fresh").write_text("y")
    replace_directory(new, old)
    assert [file.name for file in old.iterdir()] == ["fresh"]
    assert [folder.name for folder in tmp_path.iterdir()] == ["final"]

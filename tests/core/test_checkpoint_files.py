"""A damaged checkpoint is never taken for a whole one, whatever was cut, flipped or lost, and is never deleted."""

from pathlib import Path

import pytest

from safetrain.core.records.run_state import (
    MANIFEST,
    Checkpoint,
    checkpoints_in,
    fault_of,
    name_of,
    newest_whole,
    set_aside,
    to_prune,
    write_manifest,
)

CONTENTS = {"adapters.safetensors": bytes(range(256)) * 20, "state.json": b'{"step": 3}\n', "empty": b""}


def checkpoint(output: Path, step: int, epoch: int = 0) -> Checkpoint:
    folder = output / name_of(epoch, step)
    folder.mkdir(parents=True)
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    write_manifest(folder)
    assert fault_of(folder) == ""
    return Checkpoint(folder, step)


def test_whatever_is_cut_grown_flipped_or_lost_is_named(tmp_path: Path) -> None:
    for name, content in CONTENTS.items():
        file = checkpoint(tmp_path / name, 3).folder / name
        size = len(content)
        for changed in (content[:-1], content[: size // 2], content + b"\0"):
            if changed != content:
                file.write_bytes(changed)
                assert fault_of(file.parent) == f"{name} has {len(changed)} bytes instead of {size}"
        for place in (0, size // 2, size - 1) if size else ():
            flipped = bytearray(content)
            flipped[place] ^= 1 << 7
            file.write_bytes(flipped)
            assert fault_of(file.parent) == f"{name} has different contents"
        file.unlink()
        assert fault_of(file.parent) == f"{name} is missing"
    file = checkpoint(tmp_path, 3).folder / MANIFEST
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        assert fault_of(file.parent), f"byte {place} of the manifest"
    for text in ("", "[]", "null", '{"sha256": ["state.json"]}'):
        file.write_text(text)
        assert fault_of(file.parent).startswith(MANIFEST)


def test_the_newest_whole_one_is_found_and_nothing_is_changed(tmp_path: Path) -> None:
    for step in (2, 10, 9):  # not in the order of their names
        checkpoint(tmp_path, step, epoch=step // 4)
    (tmp_path / "checkpoint_epoch_9_step_x").mkdir()
    (tmp_path / "checkpoint_epoch_9_step_99").write_text("no folder")
    (tmp_path / "damaged_checkpoint_epoch_9_step_98").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert [found.step for found in checkpoints_in(tmp_path)] == [10, 9, 2]
    for step in (10, 9, 2):
        found = newest_whole(tmp_path)
        assert found is not None
        assert found.step == step
        assert sorted(tmp_path.rglob("*")) == before
        with (found.folder / "state.json").open("ab") as file:
            file.write(b"damage")
    assert newest_whole(tmp_path) is newest_whole(tmp_path / "nowhere") is None
    moved = set_aside(Checkpoint(tmp_path / name_of(2, 10), 10)), set_aside(checkpoint(tmp_path, 10, epoch=2))
    assert all((folder / "state.json").is_file() for folder in moved), "neither overwrites the other"
    assert [found.step for found in checkpoints_in(tmp_path)] == [9, 2]


@pytest.mark.parametrize(
    ("keep", "best", "gone"), [(1, 4, [6, 2]), (1, 8, [6, 4, 2]), (2, 2, [4]), (2, 0, [4, 2]), (3, 2, []), (9, 0, [])]
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, keep: int, best: int, gone: list[int]) -> None:
    folders = {step: checkpoint(tmp_path, step).folder for step in (2, 4, 6, 8)}
    assert to_prune(tmp_path, keep, best) == [folders[step] for step in gone]
    assert all(folder.is_dir() for folder in folders.values())  # it only names them

"""Several ranks make the training that one makes: the same gradient, the same weights but for rounding, one decision.

Two groups of real processes, which meet on this machine as mlx.launch lets them, do everything; the tests look at what
they have found. Of three, one has no row of the last update.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safetrain.core.events import Failed, Said, open_events, parse_event
from safetrain.core.records.metrics import parse_csv
from safetrain.engine.ranks import ALONE
from tests.conftest import ROOT
from tests.engine.test_training import final_state, read_arrays
from tests.support.random_models import TINY, build_model
from tests.support.rank_child import goes_on, gradient, on_disk, pretraining, training

SECONDS = 240
THREE = ("gradient", "is_bad", "differs", "drifts")
TWO = ("gradient", "training", "on_disk", "pretraining", "broken", "stops", "dies")
Read = Callable[[str, int], list[dict[str, Any]]]


def start(folder: Path, size: int, scenarios: tuple[str, ...]) -> list[int]:
    """Run a group of ranks; their exit codes."""
    sockets = [socket.socket() for _ in range(size)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    for each in sockets:
        each.close()
    hostfile = folder / f"hosts_{size}.json"
    hostfile.write_text(json.dumps(hosts))
    command = [sys.executable, "-m", "tests.support.rank_child", str(folder), *scenarios]
    given = {**os.environ, "MLX_HOSTFILE": str(hostfile), "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(command, env={**given, "MLX_RANK": str(rank)}, stderr=subprocess.DEVNULL)
        for rank in range(size)
    ]
    try:
        return [rank.wait(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one, two and three ranks have left."""
    found = tmp_path_factory.mktemp("ranks")
    build_model(found / "model", bits=4, **TINY)
    build_model(found / "float", **TINY)
    for made in (gradient, training, on_disk, pretraining):
        (found / f"{made.__name__}_1_0.json").write_text(json.dumps(made(ALONE, found)))
    assert start(found, 3, THREE) == [0] * 3
    assert start(found, 2, TWO) == [0, -signal.SIGKILL]
    (found / "goes_on_1_0.json").write_text(json.dumps(goes_on(ALONE, found)))
    return found


@pytest.fixture(scope="module")
def said(folder: Path) -> Read:
    """What each rank of a group has found."""

    def read(scenario: str, size: int) -> list[dict[str, Any]]:
        return [json.loads((folder / f"{scenario}_{size}_{rank}.json").read_text()) for rank in range(size)]

    return read


def adapter(run: Path) -> dict[str, np.ndarray]:
    """The weights of the last step."""
    return {name: value for name, value in final_state(run).items() if name.startswith("adapters:")}


def movement(run: Path, other: Path) -> float:
    """How far two runs ended from each other, in parts of what a run has moved: lora_b begins at zero."""
    one, two = adapter(run), adapter(other)
    assert one.keys() == two.keys()
    names = [name for name in one if name.endswith("lora_b")]
    apart = np.sqrt(sum(float(((one[name] - two[name]) ** 2).sum()) for name in one))
    return float(apart / np.sqrt(sum(float((two[name] ** 2).sum()) for name in names)))


@pytest.mark.parametrize("size", [2, 3])
def test_the_gradient_is_that_of_one_rank(said: Read, size: int) -> None:
    """The second update has one row, so all ranks but one have none."""
    (one,), many = said("gradient", 1), said("gradient", size)
    for update, (loss, labels, rows, vector) in enumerate(one["updates"]):
        shares = [each["updates"][update] for each in many]
        assert sum(share[2] for share in shares) == rows
        assert all(share[1] == labels for share in shares)
        for share in shares:
            assert share[0] == pytest.approx(loss, rel=1e-6)
            assert np.linalg.norm(np.subtract(share[3], vector)) <= 1e-5 * np.linalg.norm(vector)
            assert share[3] == shares[0][3]
    assert [share["updates"][1][2] for share in many] == [1] + [0] * (size - 1)


def test_a_training_ends_where_that_of_one_rank_ends(folder: Path, said: Read) -> None:
    """13 rows, 4 in an update: they do not divide by two, and the last update of an epoch has one row."""
    (one,), many = said("training", 1), said("training", 2)
    assert "error" not in many[0]
    assert movement(folder / "whole_2", folder / "whole_1") < 1e-4
    assert (many[0]["labels"], many[0]["metrics"]["steps"]) == (one["labels"], 8)
    records = [parse_csv((folder / f"whole_{count}" / "metrics_0.csv").read_text()) for count in (1, 2)]
    for alone, together in zip(*records, strict=True):
        for name in ("step", "epoch", "labels"):
            assert getattr(together, name) == getattr(alone, name)
        for name in ("train_loss", "valid_loss", "grad_norm"):
            measured = getattr(alone, name)
            expected = None if measured is None else pytest.approx(measured, rel=1e-4)
            assert getattr(together, name) == expected, (alone.step, name)
    names = {path.name for path in (folder / "whole_2").iterdir()}
    assert {name for name in names if name.startswith("metrics")} == {"metrics_0.csv"}, "rank 0 alone writes"
    assert all("exchange" in each["phases"] for each in many)
    assert all("save" not in each["phases"] for each in many[1:])


def test_each_rank_reads_the_base_from_its_disk(folder: Path, said: Read) -> None:
    """One rank with the base in memory ends where these do."""
    (one,), many = said("on_disk", 1), said("on_disk", 2)
    assert "error" not in many[0], many[0]["text"]
    assert movement(folder / "on_disk_2", folder / "on_disk_1") < 1e-4
    assert many[0]["metrics"]["valid_loss"] == pytest.approx(one["metrics"]["valid_loss"], rel=1e-5)


def test_a_whole_model_ends_where_that_of_one_rank_ends(folder: Path, said: Read) -> None:
    """Pretraining: ranks share the pieces of an update's windows; the last update has fewer than the others."""
    (one,), many = said("pretraining", 1), said("pretraining", 2)
    assert (many[0]["labels"], many[0]["metrics"]["steps"]) == (one["labels"], one["metrics"]["steps"])
    assert many[0]["metrics"]["valid_loss"] == pytest.approx(one["metrics"]["valid_loss"], rel=1e-5)
    untrained = read_arrays(folder / "float" / "model.safetensors")
    alone, together = adapter(folder / "pretrained_1"), adapter(folder / "pretrained_2")
    moved = sum(
        float(((value - untrained[name.removeprefix("adapters:")]) ** 2).sum()) for name, value in alone.items()
    )
    apart = sum(float(((value - together[name]) ** 2).sum()) for name, value in alone.items())
    assert np.sqrt(apart / moved) < 1e-4


def test_a_signal_on_one_rank_stops_all_and_other_ranks_go_on(folder: Path, said: Read) -> None:
    for each in said("stops", 2):
        assert (each["error"], each["code"]) == ("InterruptedRun", 130), each["text"]
        assert "Stopped at step 3 of 8; the state is saved" in each["text"]
    (found,) = said("goes_on", 1)
    assert found["resumed"] == 3
    assert movement(folder / "stopped", folder / "whole_1") < 1e-4


def test_a_run_that_goes_on_with_as_many_ranks_has_the_same_bits(folder: Path) -> None:
    assert json.loads((folder / "broken_2_0.json").read_text())["resumed"] == 5
    assert movement(folder / "broken", folder / "whole_2") == 0.0


def test_an_update_that_is_bad_on_one_rank_is_refused_by_all(folder: Path, said: Read) -> None:
    """Rank 0 writes down every row of it, whoever has computed it."""
    found = said("is_bad", 3)
    assert all(each == found[0] for each in found)
    assert (found[0]["error"], found[0]["code"]) == ("BadUpdateError", 7)
    (path,) = (folder / "bad" / "bad_updates").iterdir()
    assert len(json.loads(path.read_text())["rows"]) == 4
    assert "is not a number" in found[0]["text"]


def test_ranks_that_differ_are_refused_on_all_of_them(said: Read) -> None:
    for each in said("differs", 3):
        assert (each["error"], each["code"]) == ("ConfigError", 2)
        assert f"Rank 2 on {socket.gethostname()} would train differently" in each["text"]
        assert "got:      training rows (" in each["text"]
    for each in said("drifts", 3):
        assert each["error"] == "EngineError"
        assert "After step 7 the weights of rank 2" in each["text"]


def test_a_rank_whose_peer_is_killed_says_so(folder: Path) -> None:
    left = json.loads((folder / "dies_2_0.json").read_text())
    assert (left["error"], left["code"]) == ("EngineError", 7)
    assert "Rank 1 is gone" in left["text"]


def test_no_rank_waits_for_events_that_nobody_reads_here(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A FIFO in a folder that machines share is another machine's; why a rank ends is told through mlx.launch."""
    place = tmp_path / "events"
    os.mkfifo(place)
    unread = open_events(str(place), required=False)
    for event in (Said("hello"), Failed("ConfigError", "other data", 3)):
        unread.send(event)
    assert parse_event(capfd.readouterr().err.encode()) == Failed("ConfigError", "other data", 3)

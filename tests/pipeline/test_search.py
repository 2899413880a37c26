"""`safetrain search`: the best candidate has the bits of a plain run, however often the search was killed.

The tests of this file build on each other, in their order.
"""

import json
import math
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from safetrain.core.errors import ConfigError
from safetrain.core.records.search import BEST, DROPPED, FINISHED, LEFT_OUT, Candidate, Search
from safetrain.core.storage.files import sha256_of
from safetrain.search_plan import leg_steps, survivors, within_the_minutes
from tests.pipeline.workspace import TINY_PATHS, Workspace
from tests.support.chaos.project import left_over, wait_for

STEPS = 40
SHORT: dict[str, object] = {
    **TINY_PATHS, "train.max_steps": STEPS, "train.num_epochs": 30, "train.eval_steps": 5, "train.save_steps": 1,
    "evaluate.max_examples": 4, "evaluate.max_new_tokens": 4, "preflight.level": "quick",
}  # fmt: skip
RATES, SEARCH = "train.learning_rate=1e-4,3e-3,1e-3,3e-2", ("safetrain", "search", "--minutes", "10")
ENDS = list[tuple[str, dict[str, Any]]]()  # of the first search
ADAPTER = "checkpoints_qlora/adapters/adapters.safetensors"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("search"))
    made.make_small()
    made.set_values(SHORT)
    made.commit("short runs")
    return made


def search_of(workspace: Workspace) -> dict[str, Any]:
    return workspace.json("search/search.json")


def events_in(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def start(workspace: Workspace, *words: str) -> subprocess.Popen[bytes]:
    """Start a search in a process group of its own."""
    return subprocess.Popen(
        [*SEARCH, *words], cwd=workspace.folder, env=workspace.environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_search_tells_its_plan_and_its_verdict_and_leaves_a_finished_project(workspace: Workspace) -> None:
    done = workspace.run(*SEARCH, "--json", RATES)
    assert done.returncode == 0, done.stderr[-3000:]
    events = events_in(done.stdout)
    planned, verdict = events[0], events[-1]
    assert (planned["event"], verdict["event"]) == ("planned", "verdict")
    assert "4 candidates, rungs at 25, 50, 100 % of 40 steps, about " in done.stderr
    found = verdict["search"]
    best = next(each for each in found["candidates"] if each["state"] == BEST)
    assert (best["name"], best["steps"]) == (found["best"], STEPS)
    assert sum(each["steps"] for each in found["candidates"]) - found["steps_for_ties"] <= 2 * STEPS
    key, _, rate = best["values"][0].partition("=")
    written = re.search(rf"^  {key.partition('.')[2]}: (\S+)", (workspace.folder / "params.yaml").read_text(), re.M)
    assert written is not None
    assert float(written[1]) == float(rate) == verdict["training"]["learning_rate"]
    assert verdict["training"]["candidates"] == found["candidates"]
    finished = [each for each in found["candidates"] if each["state"] in (BEST, FINISHED)]
    assert len(workspace.succeed("dvc", "exp", "list", "--name-only").split()) == len(finished)
    report = (workspace.folder / "checkpoints_qlora/report.html").read_text()
    assert "Validation loss of the candidates" in report
    assert "Running stage 'train'" not in workspace.succeed("dvc", "repro")
    ENDS.append(end_of(workspace))
    told = json.loads(workspace.cli("result", "--json"))
    assert {key: told[key] for key in ("verdict", "command")} == {
        "verdict": verdict["verdict"],
        "command": "safetrain run",
    }
    assert told["evaluation"] == verdict["evaluation"]
    estimated = json.loads(workspace.cli("estimate", "--json"))
    assert estimated["fits"] is True
    assert sum(estimated["memory_terms"].values()) == estimated["predicted_peak_bytes"] < estimated["needed_bytes"]


def end_of(workspace: Workspace) -> tuple[str, dict[str, Any]]:
    """The adapter's hash, and the losses of every candidate at its rungs."""
    losses = {each["name"]: each["losses"] for each in search_of(workspace)["candidates"]}
    return sha256_of(workspace.folder / ADAPTER), losses


def forget(workspace: Workspace) -> None:
    """Remove the candidates, the values in params.yaml, and what DVC would bring back."""
    workspace.succeed("safetrain", "discard")
    assert not (workspace.folder / "checkpoints_qlora/search").exists()
    workspace.git("checkout", "-q", "params.yaml")
    workspace.succeed("rm", "-rf", "dvc.lock", ".dvc/cache")


def test_the_best_has_the_bits_of_a_plain_run(workspace: Workspace) -> None:
    words = next(each for each in search_of(workspace)["candidates"] if each["state"] == BEST)["values"]
    forget(workspace)
    workspace.succeed("safetrain", "run", *words)
    assert workspace.json("training_summary.json")["resumed_from_step"] == 0
    assert sha256_of(workspace.folder / ADAPTER) == ENDS[0][0]


def test_a_killed_search_goes_on_to_the_same_bits(workspace: Workspace) -> None:
    forget(workspace)
    place = workspace.folder / "checkpoints_qlora/search/search.json"
    for number in range(3):
        process, began = start(workspace, RATES), time.time()
        wait_for(lambda: place.is_file() and place.stat().st_mtime > began, "the search", 120)  # noqa: B023
        time.sleep(1 + 2 * number)
        kill = os.killpg if number % 2 else os.kill
        kill(process.pid, signal.SIGKILL)
        process.communicate()
        wait_for(lambda: not left_over(workspace.folder), "the end of all processes", 60)
    workspace.succeed(*SEARCH, RATES)
    assert end_of(workspace) == ENDS[0]


def test_a_run_continues_what_a_search_has_computed(workspace: Workspace) -> None:
    behind = next(each for each in search_of(workspace)["candidates"] if 0 < each["steps"] < STEPS)
    output = workspace.succeed("safetrain", "run", *behind["values"])
    assert f"continuing from step {behind['steps']}\n" in output
    assert workspace.json("training_summary.json")["steps"] == STEPS


def test_what_diverges_or_does_not_fit_is_told_and_left_out(workspace: Workspace) -> None:
    words = "train.learning_rate=1e-3,1,2e-3", "train.memory_limit_gb=0.15,1", "lora.scale=1000"
    done = workspace.run(*SEARCH, "--json", "--by", "score", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    states = {each["values"][:2][0] + each["values"][1]: each for each in search_of(workspace)["candidates"]}
    for rate in ("0.001", "1", "0.002"):
        small = states[f"train.learning_rate={rate}train.memory_limit_gb=0.15"]
        assert (small["state"], small["steps"], small["why"][:13]) == (LEFT_OUT, 0, "does not fit:")
    wild = states["train.learning_rate=1train.memory_limit_gb=1"]
    assert (wild["state"], "was not applied" in wild["why"]) == (DROPPED, True)
    assert all(0 <= each["score"] <= 1 for each in states.values() if each["losses"])


def test_pairs_are_compared_pair_by_pair_and_one_pair_has_no_interval(workspace: Workspace) -> None:
    pairs = workspace.folder / "data/pairs"
    pairs.mkdir()
    lines = (workspace.folder / "data/preferences.jsonl").read_text().splitlines(keepends=True)
    for name, first, last in (("train", 0, 40), ("valid", 40, 41), ("test", 41, 45)):
        (pairs / f"{name}.jsonl").write_text("".join(lines[first:last]))
    forget(workspace)
    workspace.succeed(*SEARCH, "train.method=dpo", "data.path=data/pairs", "train.learning_rate=1e-4,2e-4")
    found = search_of(workspace)["candidates"]
    assert [each["steps"] for each in found if each["state"] == BEST] == [STEPS]
    assert all(each["plus_minus"] is None for each in found)


def test_without_values_rates_come_first_then_ranks_and_a_killed_end_trains_nothing_more(workspace: Workspace) -> None:
    forget(workspace)
    workspace.succeed(*SEARCH)
    found = search_of(workspace)
    rates = sorted(float(each["values"][0].partition("=")[2]) for each in found["candidates"])
    assert len(found["candidates"]) == 5
    assert rates[0] == pytest.approx(rates[-1] / 9, rel=0.01)
    assert sum(each["values"][-1].startswith("lora.rank=") for each in found["candidates"]) == 2
    place = workspace.folder / "checkpoints_qlora/search/search.json"
    place.write_text(place.read_text().replace('"is_finished": true', '"is_finished": false'))
    assert "training" not in {each["event"] for each in events_in(workspace.run(*SEARCH, "--json").stdout)}
    assert search_of(workspace)["candidates"] == found["candidates"]


def test_if_no_candidate_is_left_the_search_says_why(workspace: Workspace) -> None:
    forget(workspace)
    done = workspace.run(*SEARCH, "--json", "train.learning_rate=0.9,1", "lora.scale=1000")
    last = events_in(done.stdout)[-1]
    assert (done.returncode, last["event"], last["exit_code"]) == (7, "error", 7)
    assert "No candidate is left" in last["message"]
    assert last["message"].count("was not applied") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.learning_rate=1e-3,0.001",), "Two candidates are the same run"),
        (("train.max_seq_length=16,24",), "cannot be compared"),
        (("train.ranks=2",), "A search trains in one process"),
        (("train.learning_rte=1,2",), "Unknown key train.learning_rte"),
        (("data.path=data/tiny,data/example",), "cannot vary the data"),
        (("train.learning_rate=1e-3", "lora.rank=4"), "nothing to search over"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_training(
    workspace: Workspace, words: tuple[str, ...], said: str
) -> None:
    before = (workspace.folder / "params.yaml").read_bytes()
    done = workspace.run(*SEARCH, "--json", *words)
    last = events_in(done.stdout)[-1]
    assert (done.returncode, last["event"], last["exit_code"]) == (2, "error", 2)
    assert said in last["message"]
    assert (workspace.folder / "params.yaml").read_bytes() == before


# The plan of a search

RUN = Candidate("", (), total_steps=312, eval_steps=30, step_seconds=1.0, start_seconds=5.0, end_seconds=30.0)


def planned(count: int, minutes: float, **changes: Any) -> Search:
    candidates = [replace(RUN, name=str(number), **changes) for number in range(count)]
    return within_the_minutes(Search((), "loss", minutes, tuple(candidates)))


def steps_of(search: Search) -> int:
    total, count = 0, len(search.remaining)
    for number in range(len(search.rungs)):
        total += count * leg_steps(search.candidates[0], search.rungs, number)
        count = survivors(count, search.rungs, number)
    return total


def test_eight_candidates_cost_two_and_a_half_runs() -> None:
    exact = planned(8, 1000, total_steps=800, eval_steps=100)
    assert steps_of(exact) == 2.5 * 800
    assert steps_of(planned(8, 1000)) <= 2.5 * 312 + 8 * 15 + 4 * 15
    for count in range(2, 20):
        assert steps_of(planned(count, 10_000, total_steps=6400, eval_steps=100)) <= (1 + math.log2(count)) * 6400


@pytest.mark.parametrize("minutes", [10, 11, 13, 16, 20, 40])
def test_a_planned_search_stays_within_its_minutes(minutes: int) -> None:
    search = planned(8, minutes)
    assert 60 * minutes >= search.planned_seconds > 0
    assert len(search.remaining) >= 2
    assert all(each.why == "too few minutes" for each in search.candidates if not each.is_on)
    assert np.all(np.diff([search.candidates[0].step_at(share) for share in search.rungs]) >= 0)


def test_too_few_minutes_are_refused_with_how_many_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"--minutes (\d+)") as refused:
        planned(8, 5)
    needed = int(re.search(r"--minutes (\d+)", str(refused.value))[1])  # type: ignore[index]
    assert len(planned(8, needed).remaining) >= 2

"""A bug report's bundle has what helps and names nobody: what is planted wherever a run writes is not in it."""

import csv
import json
import mmap
import zipfile
from pathlib import Path
from typing import Any

import pytest
from safetrain.guard.ending import Ending
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.recorder import Edge, Phase, Recorder, Work
from safetrain.core.records.metrics import COLUMNS
from safetrain.core.storage import paths
from safetrain.guard.postmortem import explain
from safetrain.guard.verdict import Evidence, judge
from safetrain.watch.redaction import OVERLAYS, Names, Redaction, names_here
from tests.conftest import ROOT
from tests.guard.test_verdict import DMESG, GIB, STACK, TABLE, ending, failed, in_gradient

ROW = "Whose birthday is on the ninth of Thermidor"
SECRET, OTHER, PASSWORD = "hf_abcdefGHIJKL0123456789xyz", "sk-proj-9f8e7d6c5b4a3f2e1d0c", "correct horse battery"
HOME, HOST, USER = "/home/marguerite", "atelier-42.example.org", "marguerite"
NAMING = f"{SECRET} {OTHER} {PASSWORD} {HOME}/models/x {HOST} atelier-42 {USER} me@example.org https://a:b@c.d/e"
NAME = "acme_patients"  # may be a key, an overlay, a function, a thread
PLANTED = (ROW, "Thermidor", SECRET, OTHER, PASSWORD, "/home", USER, "atelier-42", "me@example.org", "a:b@c.d", NAME)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a project on the planted machine, without a training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.setenv("HOSTNAME", HOST)
    monkeypatch.setenv("USER", USER)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("MY_PASSWORD", PASSWORD)
    monkeypatch.setattr("platform.node", lambda: HOST)
    params = {
        "model": {"path": f"{HOME}/m"},
        "data": {"path": ROW, "columns": {NAME: ROW}},
        "train": {"seed": 7, NAME: 1},
    }
    Path("params.yaml").write_text(json.dumps(params | {SECRET: NAMING}), encoding="utf-8")
    Path("m").mkdir()
    labels = {"label2id": {NAME: 0}, NAME: 3, "text_config": {NAME: 4, "hidden_size": 64}}
    Path("m/config.json").write_text(json.dumps(labels | {"vocab_size": 256, "model_type": "llama"}), encoding="utf-8")
    return tmp_path


def everywhere(value: Any) -> Any:
    """The record with something planted behind each of its texts, and among its keys."""
    if isinstance(value, dict):
        return {key: everywhere(item) for key, item in value.items()} | {ROW: 1, SECRET: 2, USER: 3}
    if isinstance(value, list):
        return [everywhere(item) for item in value]
    return f"{value} {NAMING}" if isinstance(value, str) else value


def died(output: Path) -> None:
    """What a training leaves that died, as far as any text of it may come from outside."""
    (output / "flight").mkdir(parents=True)
    # What safetrain writes by itself cannot quote a row: there only names are planted.
    told = {"cause": "python_error", "title": "an error in the program", "phase": "gradient", "step": 12}
    outside = [
        f"ValueError: {ROW}",
        f"KeyError: '{ROW}'",
        ROW,
        f"[load] {NAMING}",
        "it had 93 % of the machine's memory",
    ]
    outside += [f'Python was at "{HOME}/venv/lib/python3.11/site-packages/mlx_lm/generate.py", line 7 in step']
    outside += ["terminate called after throwing an instance of 'std::bad_alloc'"]
    verdict = everywhere(told) | {
        "evidence": outside,
        "quoted": [*outside[:4], outside[-1]],
        "advice": ROW,
        "next_command": f"dvc repro {ROW} a.b={SECRET} experiment={NAME} {NAME}=3",
    }
    finding = {"id": "NEAR", "severity": "warning", "count": 3, "where": [f"{ROW}:1"], "message": ROW, "remedy": ROW}
    checks = [{"id": "DATA-FILES", "status": "fail", "found": ROW}, everywhere({"id": "HW-RAM", "found": "8 GiB"})]
    samples = [{"question": ROW, "tuned": ROW}]
    records = {
        "postmortem.json": verdict,
        "data_report.json": {"source": HOME, "format": "chat", "findings": [finding], "warnings": [ROW], "split": ROW},
        "preflight_report.json": {"checks": checks},
        "evaluation.json": {"base": {"loss": 2.5}, "samples": samples, "forgetting": {"unsaid": ROW}},
        "recommended_config.json": everywhere({"reasons": {"lora.rank": "16"}, "planned_model": ROW}),
        "training_summary.json": everywhere({"method": "lora", "base_model": ROW, "proof": {"opened_by": "mlx-lm"}}),
        "machine.json": everywhere({"chip": "M1", "total_memory_bytes": 8}),
        "training_state.json": {"finished": False, "step": 12, "identity": {"settings": ROW}},
        "memory_ladder.json": everywhere({"rungs": [{"change": ROW}]}),
        "flight/job.json": everywhere({"settings": {"method": "lora", "path": ROW}}) | {"base": "m"},
        "flight/run.json": {
            "boot_id": SECRET,
            "command": f"safetrain run {ROW} experiment=minimal train.seed=3 data.path={NAMING}",
        },
    }
    for name, record in records.items():
        (output / name).write_text(json.dumps(record), encoding="utf-8")
    trace = f'Traceback (most recent call last):\n  File "{HOME}/safetrain/engine/run.py", line 3, in step\n    {ROW}\n'
    trace += f'  File "{HOME}/{USER}.py", line 4, in {NAME}\n    x\n{NAME}.{NAME}Error: {ROW}\n\n'
    trace += f"The above exception was the direct cause of {NAME}\nThread 0x00007f [{NAME}] (most recent call first):\n"
    trace += f"ValueError: {ROW}\n{ROW}\nkey: {NAMING}\n"
    for name in ("error.txt", "stacks.txt"):
        (output / "flight" / name).write_text(trace, encoding="utf-8")
    (output / f"{USER}.json").write_text("{}", encoding="utf-8")
    (output / f"training_{ROW}.json").write_text("{}", encoding="utf-8")
    recorder = Recorder(output / "flight" / "recorder.bin")
    recorder.device(NAMING[:100])
    recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(12, 1, 4, 512))
    paths.METRICS_CSV.write_text(f"{','.join(COLUMNS)},{ROW},{NAME}\n1,{ROW},2.5,{SECRET}\n", encoding="utf-8")


def bundled(*, out: str = "report.zip") -> dict[str, str]:
    """What `safetrain diagnose --bundle` has written, by name; what it said first is under an empty name."""
    done = CliRunner().invoke(app, ["diagnose", "--bundle", out], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with zipfile.ZipFile(out) as file:
        return {"": done.output} | {name: file.read(name).decode() for name in file.namelist()}


def test_nothing_that_is_planted_is_in_it_and_what_helps_is(project: Path) -> None:
    died(project / paths.OUTPUT)
    found = bundled()
    found.pop("")
    for name, text in found.items():
        assert not [planted for planted in PLANTED if planted.casefold() in text.casefold()], f"{name}: {text}"
    verdict = json.loads(found["verdict.json"])
    assert verdict["cause"].startswith("python_error")
    assert verdict["evidence"]["kept"][0] == "ValueError"
    assert "it had 93 % of the machine's memory" in verdict["evidence"]["kept"]
    assert "Python was at site-packages/mlx_lm/generate.py line 7 in step" in verdict["evidence"]["kept"]
    assert verdict["evidence"]["kept"][-1].endswith("std::bad_alloc")
    assert verdict["next_command"]["kept"].startswith("dvc repro")
    assert "safetrain/engine/run.py line 3 in step" in found["error.txt"]
    assert found["error.txt"].endswith("ValueError")
    assert json.loads(found["data_report.json"])["findings"][0]["count"] == 3
    assert json.loads(found["evaluation.json"])["base"]["loss"] == 2.5
    assert json.loads(found["params.json"])["train"]["seed"] == 7
    assert json.loads(found["model.json"]) == {
        "text_config": {"hidden_size": 64},
        "vocab_size": 256,
        "model_type": "llama",
    }
    assert "experiment=minimal train.seed=3 data.path=…" in json.loads(found["unclosed.json"])["command"]["kept"]
    assert ",gradient,before,12,1,4,512," in found["flight.csv"]
    assert json.loads(found["versions.json"])["mlx"]


QUOTING = {"a wrong setting", "another fault of mlx"}  # whose words may be anybody's
SAID = {
    "OpenBLAS": "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.",
    "C++": "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
    "numpy": "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array",
    "the kernel": "fork: Cannot allocate memory",
}
TOLD = (  # by the training itself
    ("MachineError", "macOS reports critical memory pressure (43 % free)"),
    ("TrainingError", "The validation loss is not a number at step 31."),
    ("BadUpdateError", "Update 31 was not applied: the loss is not a number."),
)
ENDS = (
    {name: end for name, (end, *_) in TABLE.items() if name not in QUOTING}
    | {name: ending(1, stderr_tail=said) for name, said in SAID.items()}
    | {said: failed(kind, said, 7) for kind, said in TOLD}
)


@pytest.mark.parametrize("end", ENDS.values(), ids=list(ENDS))
def test_no_evidence_of_a_verdict_is_lost(end: Ending) -> None:
    """All that says why the training died is what the report is for."""
    cause = judge(Evidence(end, in_gradient(), 16 * GIB, (DMESG,) if end.return_code == -9 else (), STACK))
    redaction = Redaction(Names((), (), ()))
    for line in cause.evidence:
        assert "left out" not in redaction.evidence(line, quoted=line in cause.quoted), line


@pytest.mark.parametrize("name", sorted(QUOTING))
def test_evidence_that_may_quote_anything_is_left_out(name: str) -> None:
    cause = judge(Evidence(TABLE[name][0], None, 16 * GIB, (), ""))
    redaction = Redaction(Names((), (), ()))
    assert any("left out" in redaction.evidence(line, quoted=line in cause.quoted) for line in cause.evidence)


def test_a_verdict_s_evidence_comes_from_the_death_into_the_bundle(project: Path) -> None:
    said = f"{ROW}\nValueError: {ROW}: std::bad_alloc"
    explain(project / paths.OUTPUT, ending(1, stderr_tail=said), "safetrain run")
    assert json.loads(bundled()["verdict.json"])["evidence"]["kept"] == ["ValueError: std::bad_alloc"]


def test_it_says_what_is_in_it_and_replaces_nothing(project: Path) -> None:
    """Also where there was no training."""
    found = bundled()
    said = found.pop("")
    assert all(name in said for name in found)
    assert f"{len(found)} files" in said
    assert "before you send it" in said
    again = CliRunner().invoke(app, ["diagnose", "--bundle", "report.zip"])
    assert "exists already" in str(again.exception)
    Path("dangling.zip").symlink_to("nowhere.zip")
    dangling = CliRunner().invoke(app, ["diagnose", "--bundle", "dangling.zip"])
    assert "exists already" in str(dangling.exception)
    assert "name it report.zip" in str(CliRunner().invoke(app, ["diagnose", "--bundle", "report.txt"]).exception)


def test_half_written_and_strange_records_are_told_and_end_nothing(project: Path) -> None:
    output = project / paths.OUTPUT
    died(output)
    for name in ("postmortem.json", "evaluation.json", "flight/run.json", "training_state.json"):
        (output / name).write_text("[1, 2", encoding="utf-8")
    (output / "preflight_report.json").write_text("[]", encoding="utf-8")
    (output / "flight" / "recorder.bin").write_bytes(b"SAFETRN1")
    Path("params.yaml").write_text("a: [", encoding="utf-8")
    assert "cannot be read: JSONDecodeError" in bundled()["verdict.json"]


def test_a_long_run_stays_small_and_a_running_one_is_not_touched(project: Path) -> None:
    """300,000 steps: the first, the last and some between; the recorder is read while it is mapped by its writer."""
    output = project / paths.OUTPUT
    died(output)
    with paths.METRICS_CSV.open("w", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([step, 0.5, 1.25, "", 1e-4, 0.5, step, 99.5, 2**30, 2**30, step] for step in range(300_000))
    recorder = output / "flight" / "recorder.bin"
    before = recorder.stat().st_mtime_ns
    with recorder.open("r+b") as ring, mmap.mmap(ring.fileno(), 0):
        found = bundled()
    steps = [int(line.partition(",")[0]) for line in found["training_metrics.csv"].splitlines()[1:]]
    assert (steps[0], steps[-1]) == (0, 299_999)
    assert steps == sorted(steps)
    assert len(steps) < 5000
    assert Path("report.zip").stat().st_size < 2**20
    assert recorder.stat().st_mtime_ns == before
    assert (output / "flight" / "run.json").is_file()  # the mark of a running training


def test_short_words_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_here({"HOME": "/root", "USER": "root", "API_KEY": "x", "EDITOR": "vi", "LICENSE_KEY": "0123456"})
    assert names.secrets == ("0123456",)
    told = Redaction(Names(("/srv/me",), ("me",), ("s3cret!",))).text(
        "s3cret! at /srv/me/x, the method of me: 3 /srv/men"
    )
    assert told == "(secret) at (path), the method of (name): 3 (path)"


def test_the_overlays_that_may_be_told_are_those_that_come_with_it() -> None:
    assert sorted(OVERLAYS) == sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))

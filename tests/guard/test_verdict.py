"""A training that died is told why: the right cause, how sure, whether it was memory, and what to do next."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.events import Failed
from safetrain.core.postmortem import PostMortem, describe
from safetrain.core.recorder import NO_WORK, Edge, FlightRecord, Phase, Recorder, Work, boot_id
from safetrain.core.records.run_state import name_of, write_manifest
from safetrain.core.storage.files import read_or_none
from safetrain.core.storage.paths import FLIGHT, MARKER, POSTMORTEM, RECORDER
from safetrain.guard.postmortem import close_marker, exit_code_of, explain, explain_unclosed, open_marker
from safetrain.guard.process import Ending, Limit, MemoryReadings
from safetrain.guard.verdict import CONFIRMED, LIKELY, UNSURE, Cause, judge

GIB = 2**30
MACHINE = Limit(16 * GIB, "the machine's memory")
CAP = Limit(8 * GIB, "train.memory_limit_gb")
LINES = (3, 9, 27, 81, 4, 6, 10, 28)
STACK = (
    'Current thread 0x1 (most recent call first):\n  File "engine/update.py", line 7 in of\n  File "x", line 1 in y\n'
)
REPORT = "JetsamEvent-1.ips: process 4711 was killed (per-process-limit)"
METAL = "[METAL] Command buffer execution failed: "
OOM = METAL + "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
WATCHDOG = METAL + "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
# Before macOS 26 (mlx#1335, mlx-examples#664, #866); after another program's fault, in a LoRA training with mlx-lm; and
# what that program is told.
OLD_WATCHDOG = METAL + "Internal Error (0000000e:Internal Error)"
VICTIM = METAL + "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)"
HANG = METAL + "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)"
PAGES = "vm-compressor-space-shortage"  # what ended a server of mlx models (omlx#702)
TIMEOUT = METAL + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
ALLOCATION = "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed buffer size of 8"
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nZeroDivisionError: division by zero\n'


def ending(return_code: int, footprint: int = 2 * GIB, available: int = 9 * GIB, **other: Any) -> Ending:
    """A process with plenty of memory, unless said otherwise."""
    seen = {key: other.pop(key) for key in ("pressure_level", "oom_kills") if key in other}
    usual: dict[str, Any] = {
        "pid": 4711, "return_code": return_code, "began": True, "finished": None, "failed": None, "stderr_tail": "",
        "ended_by_us": "", "overdue_seconds": 0.0, "signal_passed_on": 0, "limit": MACHINE,
        "memory": MemoryReadings(footprint, footprint, available, **seen), "total_memory_bytes": 16 * GIB,
        "started_seconds": 0.0,
    }  # fmt: skip
    return Ending(**{**usual, **other})


def in_gradient(footprint: int = 2 * GIB, active: int = GIB, predicted: int = 2 * GIB) -> FlightRecord:
    """The last record of a training that died in a gradient."""
    work, memory = Work(41, 1, 10, 512, LINES), (active, active, 0, footprint, footprint)
    return FlightRecord(9, 0.0, 0.0, Phase.GRADIENT, Edge.BEFORE, work, predicted, *memory, 1.5)


def verdict(end: Ending, last: FlightRecord | None = None, reports: tuple[str, ...] = (), stack: str = "") -> Cause:
    return judge(dataclasses.replace(end, record=last or in_gradient(), reports=reports, stack=stack))


def failed(kind: str, message: str, code: int) -> Ending:
    return ending(code, failed=Failed(kind, message, code))


def said(code: int, text: str, **other: Any) -> Ending:
    return ending(code, stderr_tail=text, **other)


NUMPY = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9.0 GiB for an array"
NO_LIBRARY = "ImportError: libgfortran-040039e1-0352e75f.so.5.0.0: failed to map segment from shared object"
NO_THREAD = "std::system_error: Resource temporarily unavailable"
HANDLES = "RuntimeError: [metal::malloc] Resource limit (499000) exceeded."
# All work of a process fails after its first fault: only a new process computes (omlx#3706)
IGNORED = METAL + (
    "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)
GRAPH = "terminate called: cudaGraphLaunch(graph_exec, stream) failed: out of memory"
CUDA = "mlx failed at step 3: cudaMallocAsync(&p, n, s) failed: out of memory"
APART = "Timeout (0:01:30)!\nThread 0x1 (most recent call first):\n  File a"
EVICTING = "cache: out of memory, evicting"  # a library's word
TABLE = [
    ("oom_kill", CONFIRMED, True, [ending(-9, oom_kills=1)]),
    ("oom_kill", LIKELY, True, [  # near the limit, with nothing left, at critical pressure
        ending(-9, footprint=int(15.3 * GIB)), ending(-9, available=GIB // 4), ending(-9, pressure_level=4),
    ]),
    ("killed", LIKELY, False, [ending(-9), ending(-9, pressure_level=2)]),  # a pressure that 8 GB Macs often have
    ("killed", CONFIRMED, False, [ending(-15)]),
    ("gpu_watchdog", CONFIRMED, False, [said(-6, WATCHDOG), said(-6, f"{VICTIM}\n{WATCHDOG}")]),
    ("gpu_watchdog", LIKELY, False, [said(-6, OLD_WATCHDOG)]),
    ("gpu_victim", CONFIRMED, False, [said(-6, VICTIM)]),
    ("gpu_timeout", CONFIRMED, False, [said(-6, HANG), said(-6, TIMEOUT), said(-6, IGNORED)]),
    ("resource_limit", CONFIRMED, False, [said(1, HANDLES)]),
    ("out_of_memory", CONFIRMED, True, [
        said(-6, OOM), said(-6, GRAPH), said(1, ALLOCATION), said(1, NUMPY), failed("EngineError", CUDA, 7),
        failed("EngineError", "out of memory: ", 7),
    ]),
    ("out_of_memory", LIKELY, True, [
        said(1, NO_THREAD, limit=CAP), said(1, NO_LIBRARY, limit=CAP), said(-11, EVICTING, available=GIB // 4),
    ]),
    ("allocation_failed", LIKELY, True, [ending(-11, footprint=7 * GIB, limit=CAP), ending(-11, available=GIB // 4)]),
    ("crash", LIKELY, False, [ending(-11), ending(-6), ending(-7), said(-11, EVICTING)]),
    ("python_error", CONFIRMED, False, [
        said(1, NO_THREAD), said(1, f"{NO_LIBRARY}: Operation not permitted"), said(1, TRACEBACK),
        said(1, "ValueError: Unable to allocate a name"),
    ]),
    ("hang", CONFIRMED, False, [ending(-15, ended_by_us="hang", overdue_seconds=700.0)]),
    ("memory_limit", CONFIRMED, True, [ending(-9, ended_by_us="limit", limit=CAP)]),
    ("orphaned", CONFIRMED, False, [ending(143, ended_by_us="orphan")]),
    ("stopped", CONFIRMED, False, [
        ending(-9, ended_by_us="second signal"), failed("InterruptedRun", "Stopped at step 3", 130),
    ]),
    ("bad_update", CONFIRMED, False, [failed("BadUpdateError", "Update 3 was not applied", 7)]),
    ("disk_full", CONFIRMED, False, [
        failed("DiskFullError", "The disk stayed full", 8), said(1, "OSError: [Errno 28] No space left on device: 'x'"),
    ]),
    ("engine_error", CONFIRMED, False, [
        failed("EngineError", "mlx: bad shape", 7),
        said(7, EVICTING, failed=Failed("EngineError", "mlx: bad shape", 7)),
    ]),
    ("refused", CONFIRMED, False, [failed("ConfigError", "train.lora is wrong", 2)]),
    ("ssh", LIKELY, False, [ending(255, host="mac2", rank=1, ranks=2)]),
    ("ranks_apart", LIKELY, False, [said(1, APART)]),
    ("unknown", UNSURE, False, [ending(3)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "confidence", "is_memory", "end"), [(*told, end) for *told, ends in TABLE for end in ends]
)
def test_each_end_has_its_cause(name: str, confidence: str, is_memory: bool, end: Ending) -> None:
    cause = verdict(end)
    assert (cause.name, cause.confidence, cause.is_memory) == (name, confidence, is_memory)
    assert cause.title
    assert cause.evidence
    assert all(cause.evidence)
    if end.stderr_tail == WATCHDOG:
        assert "memory was not the cause" in cause.advice
        assert cause.evidence == (WATCHDOG,)  # the line alone
    assert end.stderr_tail != TIMEOUT or "train.batch_size" in cause.advice


@pytest.mark.parametrize(("end", "last", "reports", "name", "confidence"), [
    (ending(-9), None, (REPORT,), "oom_kill", CONFIRMED),
    # Samples come four times a second; the record before the fatal gradient may know of more.
    (ending(-9), in_gradient(footprint=int(15.5 * GIB)), (), "oom_kill", LIKELY),
    # 2 GiB of private memory were seen, 1 of it mlx's; with a peak of 6 predicted, 7 of the 8 allowed were due.
    (ending(-11, limit=CAP), in_gradient(active=GIB, predicted=6 * GIB), (), "allocation_failed", LIKELY),
    (ending(-11, limit=CAP), in_gradient(active=GIB, predicted=2 * GIB), (), "crash", LIKELY),
])  # fmt: skip
def test_a_report_and_the_last_record_have_their_say(
    end: Ending, last: FlightRecord | None, reports: tuple[str, ...], name: str, confidence: str
) -> None:
    cause = verdict(end, last=last, reports=reports)
    assert (cause.name, cause.confidence) == (name, confidence)
    assert set(reports) <= set(cause.evidence)


@pytest.mark.parametrize(("reason", "name", "confidence"), [("", "killed", LIKELY), (PAGES, "oom_kill", CONFIRMED)])
def test_a_jetsam_report_convicts_only_the_process_that_it_gives_a_reason_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, name: str, confidence: str
) -> None:
    """Each report lists every process: after `kill -9` by hand, this one was a bystander of a kill elsewhere."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("safetrain.guard.postmortem.REPORTS", tmp_path)
    monkeypatch.setattr("safetrain.guard.postmortem.REPORT_SECONDS", 0.1)
    ours = {"name": "python3.13", "pid": os.getpid(), "rpages": 131626} | ({"reason": reason} if reason else {})
    other = {"name": "spotlightknowledged", "pid": 73341, "reason": "per-process-limit"}
    body = json.dumps({"largestProcess": "python3.13", "processes": [ours, other]}, indent=2)
    (tmp_path / "JetsamEvent-2026-09-29-121010.ips").write_text('{"bug_type":"298"}\n' + body)
    found = explain(tmp_path, dataclasses.replace(own(ending(-9)), started_seconds=0.0), "")
    assert (found.cause, found.confidence, found.is_memory) == (name, confidence, bool(reason))
    assert any(reason in text for text in found.evidence)


def test_crashes_and_hangs_name_the_innermost_line_of_python() -> None:
    for end in (ending(-11), ending(-15, ended_by_us="hang", overdue_seconds=700.0)):
        assert any('"engine/update.py", line 7' in text for text in verdict(end, stack=STACK).evidence)
    hang = verdict(ending(-15, ended_by_us="hang", overdue_seconds=700.0), stack=STACK)
    assert "nothing was recorded for 700 s" in hang.evidence


def test_a_verdict_needs_no_record_and_no_sample() -> None:
    """A process that dies at once leaves neither."""
    for code in (-9, -11, 1, 0):
        assert not judge(ending(code, footprint=0, available=2**63)).is_memory


def test_the_exit_code_is_the_child_s_and_never_0() -> None:
    ends = {
        1: (ending(0),), 137: (ending(-9), ending(-9, ended_by_us="second signal"), ending(143, ended_by_us="limit")),
        139: (ending(-11),), 5: (ending(5),), 124: (ending(0, ended_by_us="hang"), ending(-15, ended_by_us="hang")),
    }  # fmt: skip
    for code, found in ends.items():
        assert {exit_code_of(end, Cause("", "", CONFIRMED, ())) for end in found} == {code}
    no_memory = ending(1, stderr_tail="MemoryError")  # a failed allocation that Python reports
    assert exit_code_of(no_memory, judge(no_memory)) == 7


def recorded(output: Path) -> None:
    """What a process that dies in a gradient leaves in the recorder."""
    recorder = Recorder(output / FLIGHT / RECORDER)
    recorder.predicted_peak_bytes, recorder.loss = 5 * GIB, 1.5
    recorder.read_allocator = lambda: (3 * GIB, 4 * GIB, 0)
    recorder.write(Phase.GRADIENT, Edge.AFTER, NO_WORK)
    recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(41, 1, 10, 512, LINES))


def checkpoint(output: Path, step: int) -> None:
    folder = output / name_of(0, step)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    write_manifest(folder)


def own(end: Ending) -> Ending:
    """As if this process had been the training: the recorder's header holds its id."""
    return dataclasses.replace(end, pid=os.getpid(), started_seconds=2**40)


def test_a_postmortem_names_everything_and_comes_back_from_its_file(tmp_path: Path) -> None:
    recorded(tmp_path)
    checkpoint(tmp_path, 40)
    found = explain(tmp_path, own(ending(-9, footprint=3 * GIB, oom_kills=1)), "dvc repro")
    assert read_or_none(tmp_path / POSTMORTEM, PostMortem) == found
    assert (found.cause, found.is_memory, found.exit_code) == ("oom_kill", True, 137)
    assert (found.phase, found.step, found.micro_batch, found.rows, found.tokens) == ("gradient", 41, 1, 10, 512)
    assert (found.row_ids, found.resumes_from_step, found.loss) == (LINES, 40, 1.5)
    assert (found.predicted_peak_bytes, found.mlx_active_bytes, found.mlx_peak_bytes) == (5 * GIB, 3 * GIB, 4 * GIB)
    lines = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in describe(found).splitlines()}
    assert lines["what"] == "killed by the system: out of memory (confirmed)"
    where = "gradient of step 41, micro-batch 1: 10 rows, 512 tokens (train.jsonl lines 3, 9, 27, 81, 4, 6, 10, 28, …)"
    assert lines["where"] == where
    assert lines["memory"].startswith("process 3.00 GiB of 16.00 GiB (the machine's memory); mlx 3.00 GiB")
    assert "predicted peak 5.00" in lines["memory"]
    assert "everything up to step 40" in lines["kept"]
    assert lines["next"] == "dvc repro"
    foreign = explain(tmp_path, dataclasses.replace(own(ending(1, stderr_tail=TRACEBACK)), pid=2**22 + 1), "dvc repro")
    assert (foreign.phase, foreign.step) == ("start", 0), "another process's records are not this one's"
    assert "the traceback is above" in describe(foreign)
    assert "no checkpoint yet" in describe(explain(tmp_path / "elsewhere", own(ending(1)), "dvc repro"))


def test_a_refusal_does_not_hide_why_the_training_before_it_died(tmp_path: Path) -> None:
    died = explain(tmp_path, own(ending(-11)), "dvc repro")
    refused = explain(
        tmp_path, dataclasses.replace(own(failed("ConfigError", "train.lora is wrong", 2)), began=False), ""
    )
    assert (refused.cause, refused.exit_code) == ("refused", 2)
    assert read_or_none(tmp_path / POSTMORTEM, PostMortem) == died


@pytest.mark.parametrize(("changed", "cause", "confidence"), [
    (lambda marker: marker, "supervisor_killed", LIKELY),
    (lambda marker: json.dumps({**json.loads(marker), "boot_id": "another boot"}), "reboot", CONFIRMED),
    *((lambda _, text=text: text, "supervisor_killed", LIKELY) for text in ("", '{"boot_id": "x"', "[]")),
])  # fmt: skip
def test_a_sudden_end_is_told_once_at_the_next_start(
    tmp_path: Path, changed: Callable[[str], str], cause: str, confidence: str
) -> None:
    """Of the machine or of the supervisor; a run that ended in order leaves nothing to explain."""
    assert explain_unclosed(tmp_path, "dvc repro") is None
    open_marker(tmp_path, "dvc repro", MACHINE)
    close_marker(tmp_path)
    assert explain_unclosed(tmp_path, "dvc repro") is None
    assert not (tmp_path / POSTMORTEM).exists()
    recorded(tmp_path)
    open_marker(tmp_path, "dvc repro", MACHINE)
    marker = tmp_path / FLIGHT / MARKER
    assert json.loads(marker.read_text())["boot_id"] == boot_id() != ""
    marker.write_text(changed(marker.read_text()))
    found = explain_unclosed(tmp_path, "dvc repro")
    assert found is not None
    assert read_or_none(tmp_path / POSTMORTEM, PostMortem) == found
    assert explain_unclosed(tmp_path, "dvc repro") is None
    assert (found.cause, found.confidence, found.is_memory) == (cause, confidence, False)
    assert (found.phase, found.step, found.exit_code) == ("gradient", 41, 137)

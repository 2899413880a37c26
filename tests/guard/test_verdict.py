"""A training that died is told why: the right cause, how sure, whether it was memory, and what to do next."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.events import Failed
from safetrain.core.recorder import NO_WORK, Edge, FlightRecord, Phase, Recorder, Work, boot_id
from safetrain.core.records.run_state import PostMortem, describe, name_of, read_postmortem, write_manifest
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
DMESG = "Out of memory: Killed process 4711 (python)"
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
    seen = {key: other.pop(key) for key in ("stalled_percent", "pressure_level", "oom_kills") if key in other}
    usual: dict[str, Any] = {
        "pid": 4711, "return_code": return_code, "began": True, "finished": None, "failed": None, "stderr_tail": "",
        "ended_by_us": "", "overdue_seconds": 0.0, "signal_passed_on": 0, "limit": MACHINE,
        "memory": MemoryReadings(footprint, footprint, available, **seen), "total_memory_bytes": 16 * GIB,
        "started_seconds": 0.0, "started_monotonic_seconds": 0.0,
    }  # fmt: skip
    return Ending(**{**usual, **other})


def in_gradient(footprint: int = 2 * GIB, active: int = GIB, predicted: int = 2 * GIB) -> FlightRecord:
    """The last record of a training that died in a gradient."""
    work, memory = Work(41, 1, 10, 512, LINES), (active, active, 0, footprint, footprint)
    return FlightRecord(9, 0.0, 0.0, Phase.GRADIENT, Edge.BEFORE, work, predicted, *memory, 1.5)


def verdict(end: Ending, last: FlightRecord | None = None, log: tuple[str, ...] = (), stack: str = "") -> Cause:
    return judge(dataclasses.replace(end, record=last or in_gradient(), kernel_log=log, stack=stack))


def failed(kind: str, message: str, code: int) -> Ending:
    return ending(code, failed=Failed(kind, message, code))


NUMPY = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9.0 GiB for an array"
NO_LIBRARY = "ImportError: libgfortran-040039e1-0352e75f.so.5.0.0: failed to map segment from shared object"
TABLE = {
    "SIGKILL and the kernel's counter": (ending(-9, oom_kills=1), "oom_kill", CONFIRMED, True),
    "SIGKILL near the limit": (ending(-9, footprint=int(15.3 * GIB)), "oom_kill", LIKELY, True),
    "SIGKILL with nothing left": (ending(-9, available=GIB // 4), "oom_kill", LIKELY, True),
    "SIGKILL with memory to spare": (ending(-9), "killed", LIKELY, False),
    "SIGTERM from outside": (ending(-15), "killed", CONFIRMED, False),
    "Metal out of memory": (ending(-6, stderr_tail=OOM), "out_of_memory", CONFIRMED, True),
    "Metal's watchdog": (ending(-6, stderr_tail=WATCHDOG), "gpu_watchdog", CONFIRMED, False),
    "Metal's watchdog, before macOS 26": (ending(-6, stderr_tail=OLD_WATCHDOG), "gpu_watchdog", LIKELY, False),
    "another program's GPU fault": (ending(-6, stderr_tail=VICTIM), "gpu_victim", CONFIRMED, False),
    "Metal's hang": (ending(-6, stderr_tail=HANG), "gpu_timeout", CONFIRMED, False),
    "the watchdog's own words come first": (
        ending(-6, stderr_tail=f"{VICTIM}\n{WATCHDOG}"), "gpu_watchdog", CONFIRMED, False,
    ),
    "SIGKILL at critical pressure": (ending(-9, pressure_level=4), "oom_kill", LIKELY, True),
    "SIGKILL at a pressure that 8 GB Macs often have": (ending(-9, pressure_level=2), "killed", LIKELY, False),
    "Metal's time limit": (ending(-6, stderr_tail=TIMEOUT), "gpu_timeout", CONFIRMED, False),
    "mlx's handles": (
        ending(1, stderr_tail="RuntimeError: [metal::malloc] Resource limit (499000) exceeded."),
        "resource_limit", CONFIRMED, False,
    ),
    "too large a buffer": (ending(1, stderr_tail=ALLOCATION), "out_of_memory", CONFIRMED, True),
    "SIGSEGV near the cap": (ending(-11, footprint=7 * GIB, limit=CAP), "allocation_failed", LIKELY, True),
    "SIGSEGV with nothing left": (ending(-11, available=GIB // 4), "allocation_failed", LIKELY, True),
    "SIGSEGV with memory to spare": (ending(-11), "crash", LIKELY, False),
    "SIGABRT without a word": (ending(-6), "crash", LIKELY, False),
    "no thread under the cap": (
        ending(1, limit=CAP, stderr_tail="std::system_error: Resource temporarily unavailable"),
        "out_of_memory", LIKELY, True,
    ),
    "no thread without a cap": (
        ending(1, stderr_tail="std::system_error: Resource temporarily unavailable"), "python_error", CONFIRMED, False,
    ),
    "no room for a library under the cap": (
        ending(1, limit=CAP, stderr_tail=NO_LIBRARY), "out_of_memory", LIKELY, True,
    ),
    "a library that may not be loaded": (
        ending(1, stderr_tail=f"{NO_LIBRARY}: Operation not permitted"), "python_error", CONFIRMED, False,
    ),
    "a hang": (ending(-15, ended_by_us="hang", overdue_seconds=700.0), "hang", CONFIRMED, False),
    "our own limit": (ending(-9, ended_by_us="limit", limit=CAP), "memory_limit", CONFIRMED, True),
    "dvc killed": (ending(143, ended_by_us="orphan"), "orphaned", CONFIRMED, False),
    "a second Ctrl-C": (ending(-9, ended_by_us="second signal"), "stopped", CONFIRMED, False),
    "a first Ctrl-C": (failed("InterruptedRun", "Stopped at step 3", 130), "stopped", CONFIRMED, False),
    "a bad update": (failed("BadUpdateError", "Update 3 was not applied", 7), "bad_update", CONFIRMED, False),
    "a full disk": (failed("DiskFullError", "The disk stayed full", 8), "disk_full", CONFIRMED, False),
    "a full disk, in a traceback": (
        ending(1, stderr_tail="OSError: [Errno 28] No space left on device: 'x'"), "disk_full", CONFIRMED, False,
    ),
    "CUDA out of memory": (
        failed("EngineError", "mlx failed at step 3: cudaMallocAsync(&p, n, s) failed: out of memory", 7),
        "out_of_memory", CONFIRMED, True,
    ),
    "MemoryError": (failed("EngineError", "out of memory: ", 7), "out_of_memory", CONFIRMED, True),
    "another fault of mlx": (failed("EngineError", "mlx: bad shape", 7), "engine_error", CONFIRMED, False),
    "a wrong setting": (failed("ConfigError", "train.lora is wrong", 2), "refused", CONFIRMED, False),
    "an error in the program": (ending(1, stderr_tail=TRACEBACK), "python_error", CONFIRMED, False),
    "a machine that ssh does not reach": (ending(255, host="mac2", rank=1, ranks=2), "ssh", LIKELY, False),
    "ranks that never met": (
        ending(1, stderr_tail="Timeout (0:01:30)!\nThread 0x1 (most recent call first):\n  File a"), "ranks_apart",
        LIKELY, False,
    ),
    "numpy had no room": (ending(1, stderr_tail=NUMPY), "out_of_memory", CONFIRMED, True),
    "a library that mentions memory, then a crash": (
        ending(-11, stderr_tail="cache: out of memory budget, evicting"), "crash", LIKELY, False,
    ),
    "the same with nothing left": (
        ending(-11, stderr_tail="cache: out of memory, evicting", available=GIB // 4), "out_of_memory", LIKELY, True,
    ),
    "an error that mentions memory": (
        ending(1, stderr_tail="ValueError: Unable to allocate a name"), "python_error", CONFIRMED, False,
    ),
    "a library's word beside another failure": (
        ending(7, stderr_tail="cache: out of memory, evicting", failed=Failed("EngineError", "mlx: bad shape", 7)),
        "engine_error", CONFIRMED, False,
    ),
    "an end without a word": (ending(3), "unknown", UNSURE, False),
}  # fmt: skip


@pytest.mark.parametrize(("end", "name", "confidence", "is_memory"), list(TABLE.values()), ids=list(TABLE))
def test_each_end_has_its_cause(end: Ending, name: str, confidence: str, is_memory: bool) -> None:
    cause = verdict(end)
    assert (cause.name, cause.confidence, cause.is_memory) == (name, confidence, is_memory)
    assert cause.title
    assert cause.evidence
    assert all(cause.evidence)


def test_a_line_of_the_kernel_s_log_confirms_a_kill_for_memory() -> None:
    cause = verdict(ending(-9), log=(DMESG,))
    assert (cause.name, cause.confidence, DMESG in cause.evidence) == ("oom_kill", CONFIRMED, True)


def test_the_last_record_tells_of_memory_that_no_sample_saw() -> None:
    """Samples come four times a second; the record before the fatal gradient may know of more."""
    cause = verdict(ending(-9), last=in_gradient(footprint=int(15.5 * GIB)))
    assert (cause.name, cause.is_memory) == ("oom_kill", True)


@pytest.mark.parametrize(("predicted", "name"), [(6 * GIB, "allocation_failed"), (2 * GIB, "crash")])
def test_a_segfault_under_a_cap_is_judged_by_what_the_phase_was_going_to_take(predicted: int, name: str) -> None:
    """2 GiB of private memory were seen, 1 of it mlx's; with a peak of 6 predicted, 7 of the 8 allowed were due."""
    cause = verdict(ending(-11, limit=CAP), last=in_gradient(active=GIB, predicted=predicted))
    assert cause.name == name


def test_the_watchdog_s_victims_are_told_that_it_is_not_memory() -> None:
    cause = verdict(ending(-6, stderr_tail=f"loading\n{WATCHDOG}\nabort\n"))
    assert "memory was not the cause" in cause.advice
    assert cause.evidence == (WATCHDOG,)  # the line alone
    assert "train.batch_size" in verdict(ending(-6, stderr_tail=TIMEOUT)).advice


@pytest.mark.parametrize(("reason", "name", "confidence"), [("", "killed", LIKELY), (PAGES, "oom_kill", CONFIRMED)])
def test_a_jetsam_report_convicts_only_the_process_that_it_gives_a_reason_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, name: str, confidence: str
) -> None:
    """Each report lists every process: after `kill -9` by hand, this one was a bystander of a kill elsewhere."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("safetrain.core.memory.system.REPORTS", tmp_path)
    monkeypatch.setattr("safetrain.guard.postmortem.REPORT_SECONDS", 0.1)
    ours = {"name": "python3.13", "pid": os.getpid(), "rpages": 131626} | ({"reason": reason} if reason else {})
    other = {"name": "spotlightknowledged", "pid": 73341, "reason": "per-process-limit"}
    body = json.dumps({"largestProcess": "python3.13", "processes": [ours, other]}, indent=2)
    (tmp_path / "JetsamEvent-2026-09-29-121010.ips").write_text('{"bug_type":"298"}\n' + body)
    found = explain(tmp_path, dataclasses.replace(own(ending(-9)), started_seconds=0.0), "")
    assert (found.cause, found.confidence, found.is_memory) == (name, confidence, bool(reason))
    assert any(reason in text for text in found.evidence)


@pytest.mark.parametrize(("level", "word"), [(2, "warning"), (4, "critical")])
def test_macos_s_pressure_is_told_as_the_level_that_it_is(level: int, word: str) -> None:
    told = verdict(ending(-9, pressure_level=level)).evidence
    assert f"macOS reported memory pressure ({word})" in told
    assert not any("waited" in text for text in told)
    assert not any("pressure" in text for text in verdict(ending(-9, pressure_level=1)).evidence)
    stalled = verdict(ending(-9, stalled_percent=50.0)).evidence
    assert "processes waited for memory 50 % of ten seconds" in stalled


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
    assert read_postmortem(tmp_path) == found
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


def test_a_death_before_the_first_checkpoint_says_that_nothing_is_kept(tmp_path: Path) -> None:
    found = explain(tmp_path, own(ending(1, stderr_tail=TRACEBACK)), "dvc repro")
    assert (found.phase, found.step) == ("start", 0)
    assert "no checkpoint yet" in describe(found)
    assert "the traceback is above" in describe(found)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here fails to be read")
def test_a_disk_that_fails_does_not_take_the_verdict_with_it(tmp_path: Path) -> None:
    """The first page of a process's memory is none: to read it is an input/output error."""
    checkpoint(tmp_path, 40)
    state = tmp_path / name_of(0, 40) / "state.json"
    state.unlink()
    state.symlink_to("/proc/self/mem")
    found = explain(tmp_path, own(ending(-9, oom_kills=1)), "dvc repro")
    assert (found.cause, found.resumes_from_step) == ("oom_kill", 0)
    assert "the checkpoints cannot be read: Input/output error" in found.evidence
    assert read_postmortem(tmp_path) == found
    (tmp_path / POSTMORTEM).unlink()
    (tmp_path / POSTMORTEM).mkdir()  # nor does one that refuses to be written
    assert explain(tmp_path, own(ending(-9, oom_kills=1)), "dvc repro").cause == "oom_kill"


def test_rows_to_validate_on_have_no_line_numbers(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / FLIGHT / RECORDER)
    recorder.write(Phase.EVALUATE, Edge.BEFORE, Work(41, 1, 3, 96))
    assert "where:    evaluate of step 41, micro-batch 1: 3 rows, 96 tokens\n" in describe(
        explain(tmp_path, own(ending(-9)), "")
    )


def test_another_process_s_records_are_not_this_one_s(tmp_path: Path) -> None:
    recorded(tmp_path)
    foreign = dataclasses.replace(own(ending(-9)), pid=2**22 + 1)
    assert explain(tmp_path, foreign, "dvc repro").phase == "start"


def test_a_refusal_does_not_hide_why_the_training_before_it_died(tmp_path: Path) -> None:
    died = explain(tmp_path, own(ending(-11)), "dvc repro")
    refused = explain(
        tmp_path, dataclasses.replace(own(failed("ConfigError", "train.lora is wrong", 2)), began=False), ""
    )
    assert (refused.cause, refused.exit_code) == ("refused", 2)
    assert read_postmortem(tmp_path) == died


def test_a_postmortem_of_another_version_is_read_and_half_of_one_is_not(tmp_path: Path) -> None:
    found = explain(tmp_path, own(ending(-9)), "dvc repro")
    (tmp_path / POSTMORTEM).write_text(json.dumps({**dataclasses.asdict(found), "replay": None}))
    assert read_postmortem(tmp_path) == found
    for text in ("", "{", "[]", "{}"):
        (tmp_path / POSTMORTEM).write_text(text)
        assert read_postmortem(tmp_path) is None


def test_a_run_that_ended_in_order_leaves_nothing_to_explain(tmp_path: Path) -> None:
    assert explain_unclosed(tmp_path, "dvc repro") is None
    open_marker(tmp_path, "dvc repro")
    close_marker(tmp_path)
    assert explain_unclosed(tmp_path, "dvc repro") is None
    assert not (tmp_path / POSTMORTEM).exists()


def unclosed(output: Path, again: str = "dvc repro") -> PostMortem:
    found = explain_unclosed(output, again)
    assert found is not None
    assert read_postmortem(output) == found
    assert explain_unclosed(output, again) is None  # told once
    return found


def test_a_reboot_in_the_middle_is_told_at_the_next_start(tmp_path: Path) -> None:
    recorded(tmp_path)
    open_marker(tmp_path, "dvc repro")
    marker = tmp_path / FLIGHT / MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "boot_id": "another boot"}))
    found = unclosed(tmp_path)
    assert (found.cause, found.confidence, found.is_memory) == ("reboot", CONFIRMED, False)
    assert (found.phase, found.step, found.exit_code) == ("gradient", 41, 137)


def test_a_supervisor_that_was_killed_is_told_at_the_next_start(tmp_path: Path) -> None:
    recorded(tmp_path)
    open_marker(tmp_path, "dvc repro")
    assert json.loads((tmp_path / FLIGHT / MARKER).read_text())["boot_id"] == boot_id() != ""
    found = unclosed(tmp_path)
    assert (found.cause, found.confidence, found.is_memory) == ("supervisor_killed", LIKELY, False)
    assert found.step == 41


@pytest.mark.parametrize("text", ["", '{"boot_id": "x"', "[]", "{}"])
def test_a_marker_that_was_cut_off_still_tells_of_a_sudden_end(tmp_path: Path, text: str) -> None:
    (tmp_path / FLIGHT).mkdir()
    (tmp_path / FLIGHT / MARKER).write_text(text)
    assert unclosed(tmp_path).cause == "supervisor_killed"


def test_every_deadly_signal_has_a_verdict() -> None:
    for number in signal.Signals:
        assert verdict(ending(-number)).name in ("killed", "crash")

"""The report of a machine is a block to paste: its figures, a verdict for each assumption, and no names."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from safetrain.core.memory.budget import Readings
from safetrain.core.protocol.selftest import (
    KINDS,
    DeviceFacts,
    DirtyPages,
    Exactness,
    Flushes,
    Kernels,
    Line,
    ProcessMemory,
    Shapes,
    Timed,
    UpdateCost,
)
from safetrain.core.storage.records import from_line, to_line
from safetrain.plan.report import FILES, Report, Section, collect, in_child
from safetrain.plan.report_files import ask_dirty_pages
from safetrain.plan.report_system import JetsamAccess, MakeFinds, SystemFacts, ask_jetsam, ask_make
from safetrain.plan.report_text import COLUMNS, block, without_names
from safetrain.plan.report_verdicts import verdicts
from tests.conftest import ROOT
from tests.core.readings import WORKING_SET_8

ENGINE = "safetrain.engine.report"
MIB, GIB = 2**20, 2**30


def timed_ways(causal_mib: int) -> tuple[Line, ...]:
    """Attention at 2,048 tokens, of which the causal one takes so much."""
    peaks = {"boolean mask": 800, "causal": causal_mib, "unfused": 900}
    return tuple(
        Timed(f"{name} 2048 {way}", 0.0123, peak * MIB)
        for name, peak in peaks.items()
        for way in ("forward", "gradient")
    )


def products(list_seconds: float) -> tuple[Line, ...]:
    return (
        Shapes("4 bits, 4096 -> 14336, 2048 tokens; plain 4096 x 4096"),
        Timed("(1,T,width)", 0.1, 56 * MIB),
        Timed("(T,1,width)", list_seconds, 56 * MIB),
        Timed("(T,width)", 0.101, 56 * MIB),
        Timed("float32", 0.09, 64 * MIB),
        Timed("float16", 0.06, 32 * MIB),
        Timed("bfloat16", 0.07, 32 * MIB),
    )


def sections(
    device: DeviceFacts, *, causal_mib: int, list_seconds: float, files: tuple[Line, ...]
) -> dict[str, Section]:
    found: dict[str, tuple[Line, ...]] = {
        "files": files,
        "device": (device,),
        "products": products(list_seconds),
        "attention": (Shapes("32 heads of size 128, bfloat16"), *timed_ways(causal_mib)),
        "rows": (UpdateCost("512", 0.1, 60 * MIB, 10 * MIB), UpdateCost("2048", 0.5, 210 * MIB, 10 * MIB)),
        "kernels": (Shapes("8 blocks"), Kernels(700, 200, 1036),),
        "exactness": (Exactness("random", 1e-3, 2e-2, in_float32=False, on_cpu=False),),
        "model": (Exactness("encyclopedia-3m", 1e-4, 3e-4, in_float32=True, on_cpu=False),),
        "update": (
            Shapes("4 blocks"), UpdateCost("safetrain", 0.6, 900 * MIB, 300 * MIB),
            ProcessMemory(560 * MIB, 200 * MIB, 300 * MIB, 100 * MIB),
        ),
        "mlx_lm": (UpdateCost("mlx_lm", 0.7, 1500 * MIB, 300 * MIB),),
    }  # fmt: skip
    return {name: Section(lines) for name, lines in found.items()}


# Made up, but for the memory: an M1 of 8 GB at rest (MakazhanAlpamys/Soup #663: 69 % free).
MAC = Report(
    "2026-11-22", 61.4,
    SystemFacts(
        "macOS 26.1", True, "Apple M1", "arm64", 8, ("Python 3.12.4", "mlx 0.32.4", "mlx-lm 0.32.2"),
        Readings(8 * GIB, 2 * GIB, int(1.3 * GIB), 1, 69), 0, GIB, None,
        MakeFinds("GNU Make 3.81", by_name=False, by_path=True), JetsamAccess(3, readable=True),
    ),
    sections(
        DeviceFacts("metal", "Apple M1", "applegpu_g13g", WORKING_SET_8, 0, 100 * MIB, ""),
        causal_mib=100, list_seconds=0.1,
        files=(Flushes(0.0004, 0.0191), DirtyPages(written=True, fsync=True, full=True, msync=False)),
    ),
)  # fmt: skip
GPU = Report(
    "2026-11-22", 33.0,
    SystemFacts(
        "Linux 6.8.0", False, "AMD EPYC", "x86_64", 8, ("glibc 2.39", "mlx 0.32.4", "driver 580.65"),
        Readings(64 * GIB, 60 * GIB), 0, 0, 32 * GIB, MakeFinds("GNU Make 4.3", by_name=True, by_path=True), None,
    ),
    sections(
        DeviceFacts("cuda", "NVIDIA A10G", "compute capability 8.6", 0, 22 * GIB, 300 * MIB, ""),
        causal_mib=890, list_seconds=3.2, files=(Flushes(0.002, None),),
    ),
)  # fmt: skip


def test_a_mac_s_block() -> None:
    lines = block(MAC).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    for expected in (
        "machine    Apple M1, 8 cores, arm64, macOS 26.1",
        "           metal, Apple M1, applegpu_g13g",
        "           wired 1.30 GiB, pressure level 1, 69 % free",
        "           working set 5.33 GiB",
        "             (T,1,width)      100.0 ms    1.00 x",
        "             2048  causal           12.3 ms  100.0 MiB    12.3 ms  100.0 MiB",
        "             gradient 700 + optimizer 200 = 900; mlx_lm 1,036",
        "             encyclopedia-3m, float32   loss 1e-04, gradient 3e-04",
        "             mlx_lm           700.0 ms    1.46 GiB at the peak",
        "files      1 MiB: fsync 0.4 ms, F_FULLFSYNC 19.1 ms",
        "jetsam     3 reports, readable",
    ):
        assert expected in lines
    text = " ".join(block(MAC).split())
    assert "GNU Make 3.81: a program by name NOT found, by its quoted path found" in text
    assert "written dirty, fsync dirty, F_FULLFSYNC dirty, msync clean" in text
    assert set(verdicts(MAC).values()) == {"ok"}
    assert text.endswith("full flush ok, mapped pages ok, jetsam ok ```")


def test_a_gpu_s_verdicts() -> None:
    """Scores of all pairs in memory are wrong; a slow list shape is only told, because lists are flattened."""
    found = verdicts(GPU)
    assert [name for name, word in found.items() if word == "wrong"] == ["attention"]
    assert [name for name, word in found.items() if word == "not here"] == ["full flush", "mapped pages", "jetsam"]
    assert "             (T,1,width)    3,200.0 ms   32.00 x" in block(GPU).splitlines()
    assert "container limit 32.00 GiB" in block(GPU)
    assert "attention wrong" in " ".join(block(GPU).split())


def test_a_cpu_says_nothing_of_gpus() -> None:
    cpu = DeviceFacts("cpu", "", "", 0, 0, 100 * MIB, "OpenBLAS 0.3.34")
    found = verdicts(dataclasses.replace(GPU, sections={**GPU.sections, "device": Section((cpu,))}))
    silent = {"products", "bfloat16", "attention", "kernels", "speed", "full flush", "mapped pages", "jetsam"}
    assert {name for name, word in found.items() if word == "not here"} == silent


@pytest.mark.parametrize(
    ("section", "name", "line"),
    [
        ("products", "products", Timed("(T,width)", 1.6, 1)),
        ("products", "bfloat16", Timed("bfloat16", 0, 0, failed="no such kernel")),
        ("rows", "long rows", UpdateCost("2048", 0.5, 810 * MIB, 10 * MIB)),
        ("kernels", "kernels", Kernels(2714, 2465, 1036)),
        ("exactness", "exact", Exactness("random", 0.2, 0.01, in_float32=False, on_cpu=False)),
        ("update", "process", ProcessMemory(900 * MIB, 200 * MIB, 300 * MIB, 100 * MIB)),
        ("mlx_lm", "peak", UpdateCost("mlx_lm", 0.7, 800 * MIB, 300 * MIB)),
        ("mlx_lm", "speed", UpdateCost("mlx_lm", 0.3, 1500 * MIB, 300 * MIB)),
        ("files", "full flush", Flushes(0.001, None)),
        ("files", "mapped pages", DirtyPages(written=True, fsync=True, full=True, msync=True)),
    ],
)
def test_what_contradicts_an_assumption_is_wrong(section: str, name: str, line: Line) -> None:
    kept = [
        old for old in MAC.sections[section].lines
        if type(old) is not type(line) or getattr(old, "name", 1) != getattr(line, "name", 1)
    ]  # fmt: skip
    changed = {**MAC.sections, section: Section((*kept, line))}
    found = verdicts(dataclasses.replace(MAC, sections=changed))
    assert {key for key, word in found.items() if word == "wrong"} == {name}


def test_a_section_that_dies_is_told_and_the_rest_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "report_child.py"
    child.write_text(
        "import os, sys\n"
        f"print({to_line(MAC.sections['device'].lines[0])!r})\n"
        f"print({to_line(Timed('causal 2048 forward', 0.5, MIB))!r}, flush=True)\n"
        "if sys.argv[1] == 'attention': os.kill(os.getpid(), 9)\n"
        "if sys.argv[1] == 'kernels': raise OSError(f'{os.getcwd()}/secret is missing')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    report = collect("report_child", tmp_path, lambda _: None)
    text = block(report)
    assert "FAILED (attention): killed by signal 9" in text
    assert "2048  causal          500.0 ms" in text  # what it said before
    assert "FAILED (kernels): exit code 1: OSError: (path)" in text
    assert verdicts(report)["attention"] == verdicts(report)["kernels"] == "wrong"
    assert "metal, Apple M1" in text
    assert text.splitlines()[-2].endswith(("jetsam not here", "jetsam ok"))
    assert "secret" not in text


def test_a_ctrl_c_prints_what_there_is() -> None:
    command = [sys.executable, "-m", "safetrain.cli", "selftest", "--report"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT
    )
    assert process.stderr is not None
    while "device" not in (line := process.stderr.readline()):
        assert line, "it ended"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert text.startswith("```\nsafetrain selftest --report, ")
    assert "files      1 MiB: fsync" in text
    assert "(device: interrupted)" in text
    assert "(kernels: not begun)" in text
    assert "wrong" not in text.partition("verdicts:")[2]


def test_the_cheapest_sections_run_here(tmp_path: Path) -> None:
    device, files = in_child(ENGINE, ["device", str(tmp_path)]), in_child(FILES, [])
    assert not device.ended
    (facts,) = device.all(DeviceFacts)
    assert facts.process_bytes > 20 * MIB
    assert files.all(Flushes)[0].fsync_seconds > 0


def test_a_line_that_is_cut_off_is_no_value() -> None:
    whole = to_line(Kernels(1, 2, 3))
    assert from_line(whole, KINDS) == Kernels(1, 2, 3)
    assert from_line(whole[:-4], KINDS) is None
    assert from_line("a library's banner", KINDS) is None
    assert from_line('{"type": "Unheard", "of": 1}', KINDS) is None


def test_no_path_is_pasted() -> None:
    told = f"ValueError: {Path.home()}/My models/x.safetensors is 3 bytes, see ~/notes and /opt/a/b.txt; 5 tokens/s"
    assert without_names(told) == "ValueError: (path), see (path) and (path); 5 tokens/s"
    assert without_names(f"{Path.home().name} may not") == "(user) may not"


def test_make_and_jetsam_reports_are_asked(tmp_path: Path) -> None:
    make = ask_make()
    assert make is not None
    assert make.by_path
    assert make.version.startswith("GNU Make")
    assert ask_jetsam(tmp_path / "nowhere") is None
    (tmp_path / "JetsamEvent-2026-11-22-101010.ips").write_text("{}\n{}")
    assert ask_jetsam(tmp_path) == JetsamAccess(1, readable=True)


@pytest.mark.skipif(sys.platform == "darwin", reason="there the answer is what the report is for")
def test_the_dirty_page_question_can_be_asked() -> None:
    """Linux's mincore has no modified bit."""
    assert ask_dirty_pages() == DirtyPages(written=False, fsync=False, full=False, msync=False)

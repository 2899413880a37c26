"""The self-test's report as one block of plain text, at most 80 columns, without user names or paths."""

import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from safetrain.core.formatting import counted, size_text
from safetrain.core.protocol.selftest import (
    DirtyPages,
    Exactness,
    Flushes,
    Kernels,
    ProcessMemory,
    Shapes,
    Timed,
    UpdateCost,
)
from safetrain.plan.report import INTERRUPTED, Report
from safetrain.plan.report_verdicts import allowed_process_bytes, beside_mlx_bytes, budget_of, verdicts

COLUMNS, LABEL = 80, 11
FENCE = "```"  # so that a forge keeps the columns
NOT_ASKED = "make test; safetrain preflight --level certify; how soon after a kill its Jetsam report is there"
REST = r"[^'\":,;()]*"
PATH = re.compile(r"(?<![\w/.])~?/[^\s'\":,;()]+")


def block(report: Report) -> str:
    """The whole report, verdicts at the end, fenced as code."""
    lines = [f"safetrain selftest --report, {report.date}, {report.seconds:.0f} s", ""]
    for label, texts in _parts(report):
        for number, text in enumerate(texts):
            lines += _line(label if number == 0 else "", text)
    words = ", ".join(f"{name} {word}".replace(" ", "\0") for name, word in verdicts(report).items())
    lines += ["", *(line.replace("\0", " ") for line in textwrap.wrap(f"verdicts: {words}", COLUMNS))]
    return "\n".join([FENCE, *lines, FENCE])


def without_names(text: str) -> str:
    """``text`` without paths and the user's name. Behind the user's own folders goes all that may be a path."""
    user = Path.home().name
    for folder in (Path.cwd(), Path(sys.prefix), Path(tempfile.gettempdir()), Path.home()):
        if folder != Path(folder.anchor):
            text = re.sub(re.escape(str(folder)) + REST, "(path)", text)
    text = PATH.sub("(path)", text)
    return re.sub(rf"\b{re.escape(user)}\b", "(user)", text) if user else text


def _parts(report: Report) -> Iterator[tuple[str, list[str]]]:
    """Each label with its lines."""
    yield "machine", _machine(report)
    yield "memory", _memory(report)
    yield "products", [*_products(report), *_ended(report, "products")]
    yield "attention", [*_attention(report), *_ended(report, "attention")]
    yield "long rows", [*_long_rows(report), *_ended(report, "rows")]
    yield "kernels", [*_kernels(report), *_ended(report, "kernels")]
    yield "exact", [*_exact(report), *_ended(report, "exactness"), *_ended(report, "model")]
    yield "update", [*_updates(report), *_ended(report, "update"), *_ended(report, "mlx_lm")]
    yield "process", [_process(report, line) for line in report.all("update", ProcessMemory)]
    yield "files", [*_files(report), *_ended(report, "files")]
    yield "make", [_make(report)]
    yield "jetsam", [_jetsam(report)]
    yield "not asked", [NOT_ASKED]


def _line(label: str, text: str) -> list[str]:
    """One text beside its label; long ones are wrapped, tables fit."""
    whole = f"{label:<{LABEL}}{text}"
    if len(whole) <= COLUMNS:
        return [whole.rstrip()]
    return textwrap.wrap(whole, COLUMNS, subsequent_indent=" " * (LABEL + 2), break_on_hyphens=False)


def _ended(report: Report, section: str) -> list[str]:
    """How a section ended badly, or that it did not come to its end."""
    if section not in report.sections:
        return [f"({section}: not begun)"]
    ended = report.sections[section].ended
    if ended == INTERRUPTED:
        return [f"({section}: interrupted)"]
    return [f"FAILED ({section}): {without_names(ended)}"] if ended else []


def _machine(report: Report) -> list[str]:
    system, device = report.system, report.device
    lines = [f"{system.chip}, {counted(system.cores, 'core')}, {system.architecture}, {system.system}"]
    lines += [", ".join(system.versions)]
    if device is not None:
        parts = [device.backend, device.device, device.architecture, device.blas if device.backend == "cpu" else ""]
        lines += [", ".join(part for part in parts if part)]
    return lines + _ended(report, "device")


def _memory(report: Report) -> list[str]:
    system, memory, device = report.system, report.system.memory, report.device
    limit = system.container_limit_bytes
    lines = [
        f"{size_text(memory.total_bytes)}, available {size_text(memory.available_bytes)}; "
        f"swap {size_text(system.swap_used_bytes)} of {size_text(system.swap_total_bytes)}"
    ]
    lines += [f"container limit {size_text(limit)}"] if limit is not None else []
    if system.is_macos:
        lines += [
            f"wired {size_text(memory.wired_bytes)}, pressure level {memory.pressure_level}, "
            f"{memory.free_percent} % free"
        ]
    budget = budget_of(report)
    if device is not None and budget is not None:
        of_gpu = {"metal": ("working set", device.working_set_bytes), "cuda": ("free on the GPU", device.free_bytes)}
        if device.backend in of_gpu:
            name, size = of_gpu[device.backend]
            lines += [f"{name} {size_text(size)}"]
        name, size = of_gpu.get(device.backend, ("total", memory.total_bytes))
        lines += [f"budget by our rule {size_text(budget)}, {100 * budget / max(1, size):.0f} % of {name}"]
    return lines


def _shapes(report: Report, section: str) -> list[str]:
    return [shapes.text for shapes in report.all(section, Shapes)]


def _products(report: Report) -> list[str]:
    lines, first = _shapes(report, "products"), dict[bool, Timed]()
    for timed in report.all("products", Timed):
        base = first.setdefault(timed.name.startswith("("), timed)
        ratio = f"{timed.seconds / base.seconds:8.2f} x" if base.seconds and not timed.failed else ""
        lines.append(f"  {timed.name:<14}{_time(timed):>11}{ratio}")
    return lines


def _attention(report: Report) -> list[str]:
    """Forward and gradient of one way in a line."""
    found = {timed.name: timed for timed in report.all("attention", Timed)}
    lines = _shapes(report, "attention")
    if found:
        lines.append(f"  {'tokens':<19}{'forward':>11}{'peak':>11}{'gradient':>11}{'peak':>11}")
    for name, forward in found.items():
        way, _, kind = name.rpartition(" ")
        if kind == "forward":
            gradient, (what, _, tokens) = found.get(f"{way} gradient"), way.rpartition(" ")
            cells = f"{_time(forward):>11}{size_text(forward.peak_bytes):>11}"
            if gradient is not None:
                cells += f"{_time(gradient):>11}{size_text(gradient.peak_bytes):>11}"
            lines.append(f"  {tokens:<6}{what:<13}{cells}")
    failed = sorted({f"  {timed.name}: {without_names(timed.failed)}" for timed in found.values() if timed.failed})
    return lines + failed


def _long_rows(report: Report) -> list[str]:
    lines = [f"updates of one row; {text}" for text in _shapes(report, "rows")]
    for cost in report.all("rows", UpdateCost):
        beside = size_text(cost.peak_bytes - cost.still_bytes)
        lines.append(f"  {cost.name + ' tokens':<14}{_milliseconds(cost.seconds):>11}{beside:>12} beside what stays")
    return lines


def _kernels(report: Report) -> list[str]:
    lines = _shapes(report, "kernels")
    for found in report.all("kernels", Kernels):
        lines.append(
            f"  gradient {found.gradient:,} + optimizer {found.optimizer:,} = {found.gradient + found.optimizer:,}; "
            f"mlx_lm {found.mlx_lm:,}"
        )
    return lines


def _exact(report: Report) -> list[str]:
    lines = ["relative differences from mlx-lm's own layers and plain cross-entropy"]
    for found in report.all("exactness", Exactness) + report.all("model", Exactness):
        name = f"{found.name}, {'float32' if found.in_float32 else '16 bits'}"
        lines.append(f"  {name:<27}loss {found.loss_difference:.0e}, gradient {found.gradient_difference:.0e}")
    return lines


def _updates(report: Report) -> list[str]:
    lines = _shapes(report, "update")
    for cost in report.all("update", UpdateCost) + report.all("mlx_lm", UpdateCost):
        lines.append(f"  {cost.name:<14}{_milliseconds(cost.seconds):>11}{size_text(cost.peak_bytes):>12} at the peak")
    return lines


def _process(report: Report, memory: ProcessMemory) -> str:
    return (
        f"after an update {size_text(memory.footprint_bytes)} (resident {size_text(memory.resident_bytes)}), "
        f"{size_text(beside_mlx_bytes(memory))} beside mlx; a plan leaves {size_text(allowed_process_bytes(report))}"
    )


def _files(report: Report) -> list[str]:
    lines = list[str]()
    for found in report.all("files", Flushes):
        full = "not here" if found.full_seconds is None else _milliseconds(found.full_seconds)
        lines.append(f"1 MiB: fsync {_milliseconds(found.fsync_seconds)}, F_FULLFSYNC {full}")
    for pages in report.all("files", DirtyPages):
        states = {"written": pages.written, "fsync": pages.fsync, "F_FULLFSYNC": pages.full, "msync": pages.msync}
        told = ", ".join(f"{name} {'dirty' if dirty else 'clean'}" for name, dirty in states.items())
        lines.append(f"a mapped page, after each in turn: {told}")
    return lines


def _make(report: Report) -> str:
    make = report.system.make
    if make is None:
        return "none"
    found = {True: "found", False: "NOT found"}
    return f"{make.version}: a program by name {found[make.by_name]}, by its quoted path {found[make.by_path]}"


def _jetsam(report: Report) -> str:
    jetsam = report.system.jetsam
    if jetsam is None:
        return "macOS alone"
    return f"{counted(jetsam.reports, 'report')}, readable" if jetsam.readable else "reports cannot be read"


def _time(timed: Timed) -> str:
    return "failed" if timed.failed else _milliseconds(timed.seconds)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"

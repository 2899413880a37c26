"""What `safetrain monitor` takes to read a long run, and whether a training notices that it is watched.

    python -m benchmarks.bench_monitor [--lines 100000] [--attach 50]

A long run has a hundred thousand lines of metrics, a full flight recorder and a journal of a day. Then a real training
is watched: monitors are attached and killed while it runs, and its final adapter is compared with an unwatched one's.
"""

import argparse
import io
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.machine import write_result
from safetrain.core.events import Journal, Progress
from safetrain.core.formatting import counted
from safetrain.core.recorder import Phase, Recorder, Work
from safetrain.core.records.metrics import COLUMNS
from safetrain.core.run_folder import FolderFiles, RunReader
from safetrain.core.storage import paths
from safetrain.core.storage.run_files import FLIGHT, JOURNAL, RECORDER
from safetrain.watch.monitor import MonitorView, look_at
from safetrain.watch.monitor_screen import MonitorScreen
from tests.support.attached import Attached, attach_and_kill
from tests.support.chaos.project import Fingerprint, Project, scratch_folder

REFRESHES, NEW_LINES = 20, 50  # lines that are added between two refreshes
MARKS = 8640  # of a day
UPDATES = 300  # of each training that is watched
WATCHED = {"max_steps": UPDATES, "num_epochs": 1000, "save_steps": 100, "eval_steps": 100, "log_steps": 1}
PAIRS = 3
LOOK_SECONDS = 0.3  # that each monitor is left alone after it has shown something


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--attach", type=int, default=50)
    asked = parser.parse_args()
    rows = [reading(lines) for lines in (1000, asked.lines // 10, asked.lines)]
    header = ["lines of metrics", "MiB", "first read, s", "of the processor", "refresh, ms: median", "longest"]
    header += ["of the processor", "drawn in 80 x 24", "200 x 50", "memory, MiB"]
    notes = [
        f"First read: every line. Refresh: {NEW_LINES} new lines, recorder, journal, the other files, the machine's "
        "processes, and what is shown worked out. Of the processor: the same in processor time, which "
        "other programs on the machine do not change. Memory: of the monitor's process.",
        *watched(asked.attach),
    ]
    write_result("bench_monitor", "What the monitor takes, and what a watched training notices", header, rows, notes)


def reading(lines: int) -> list[object]:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch)
        metrics = output / paths.METRICS_CSV.name
        write_records(output, lines)
        size, reader = metrics.stat().st_size, RunReader(FolderFiles(output))
        began, busy = time.perf_counter(), time.process_time()
        look_at(reader, output)
        first, first_busy = time.perf_counter() - began, time.process_time() - busy
        took, worked = list[float](), list[float]()
        for number in range(REFRESHES):
            with metrics.open("a") as file:
                file.writelines(metrics_line(lines + NEW_LINES * number + n) for n in range(NEW_LINES))
            began, busy = time.perf_counter(), time.process_time()
            view = look_at(reader, output)
            took.append(1000 * (time.perf_counter() - began))
            worked.append(1000 * (time.process_time() - busy))
        small, large = (drawing_ms(view, *size) for size in ((80, 24), (200, 50)))
        memory = psutil.Process().memory_info().rss / 2**20
    figures = [f"{first:.2f}", f"{first_busy:.2f}", f"{statistics.median(took):.0f}", f"{max(took):.0f}"]
    figures += [f"{statistics.median(worked):.0f}", f"{small:.0f} ms", f"{large:.0f} ms", f"{memory:.0f}"]
    return [f"{lines:,}", f"{size / 2**20:.1f}", *figures]


def drawing_ms(view: MonitorView, width: int, height: int) -> float:
    """The median time to draw."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True)
    took = list[float]()
    for _ in range(REFRESHES):
        began = time.perf_counter()
        console.print(MonitorScreen(view, braille=True), height=height)
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)


def write_records(output: Path, lines: int) -> None:
    """Of a run that is so many updates old and still goes on."""
    (output / FLIGHT).mkdir()
    with (output / paths.METRICS_CSV.name).open("w") as file:
        file.write(",".join(COLUMNS) + "\n")
        file.writelines(metrics_line(step) for step in range(lines))
    recorder = Recorder(output / FLIGHT / RECORDER)
    for step in range(2500):
        for phase in (Phase.GRADIENT, Phase.OPTIMIZER):
            with recorder.phase(phase, Work(step, 0, 16, 500, (1, 2, 3))):
                pass
    journal = Journal(output / FLIGHT / JOURNAL)
    for number in range(MARKS):
        journal.write(Progress(number, 20.0 * number, number // 10))


def metrics_line(step: int) -> str:
    """As a training writes it."""
    valid = f"{1.9 + 1 / (1 + step)}" if step % 1000 == 0 else ""
    loss, seconds = 1.8123456789 + 1 / (1 + step), 0.08 * step
    front = f"{step},{step / 1e5},{loss},{valid},0.00020123,0.81234"
    return f"{front},{26 * step},951.2,28141024,129363968,{seconds:.3f}\n"


def watched(times: int) -> list[str]:
    """The notes on a training that is watched."""
    with scratch_folder() as folder:
        project = Project(folder, train=WATCHED)
        project.plan()
        alone, beside = list[Trained](), list[Trained]()
        for _ in range(PAIRS):
            alone.append(train(project))
            beside.append(train(project, monitor=("--plain", "--refresh", "5")))
        seen, endings = list[Attached](), list[Fingerprint | None]()
        while len(seen) < times:
            process = project.start_training(anew=True)
            seen += attach_and_kill(project, process, times - len(seen), LOOK_SECONDS)
            endings.append(project.fingerprint() if project.finish(process).code == 0 else None)
    same = {*endings, *(each.fingerprint for each in (*alone, *beside))} == {alone[0].fingerprint}
    drawn = sum(each.drawn_bytes > 0 for each in seen)
    kinds = (
        f"{len(seen)} monitors, each in a terminal of its own, on screen, --plain and --json in turn, ended by "
        "SIGKILL, SIGINT, SIGTERM and SIGHUP in turn"
    )
    which = "bit for bit those" if same else "**NOT** those"
    trainings = counted(len(endings), "training")
    sentence = (
        f"**Watched.** {trainings} of {UPDATES} updates (a random 4-bit Llama of two blocks, LoRA): "
        f"{kinds}; {drawn} of them had shown something. Adapter, checkpoint and metrics of each training are {which} "
        "of the unwatched one."
    )
    busy, wall = sum(each.monitor_cpu_seconds for each in beside), sum(each.wall_seconds for each in beside)
    speeds = (
        f"{PAIRS} pairs of such trainings, unwatched and beside a monitor at `--refresh 5`, in turn: updates took "
        f"{seconds_text(alone)} s and {seconds_text(beside)} s. The monitor took "
        f"{100 * busy / wall:.1f} % of one core, most of it for its own start."
    )
    if not same or drawn < len(seen):
        print("a training was disturbed, or a monitor showed nothing", file=sys.stderr)
    return [sentence, speeds]


def seconds_text(trainings: "list[Trained]") -> str:
    """Of their updates."""
    return ", ".join(f"{each.seconds:.1f}" for each in trainings)


class Trained:
    """A training that came to its end."""

    def __init__(self, project: Project, wall_seconds: float, monitor_cpu_seconds: float) -> None:
        self.fingerprint: Fingerprint = project.fingerprint()
        self.seconds = float(project.json(paths.SUMMARY.name)["elapsed_seconds"])
        self.wall_seconds, self.monitor_cpu_seconds = wall_seconds, monitor_cpu_seconds


def train(project: Project, monitor: tuple[str, ...] = ()) -> Trained:
    """From the beginning to the end; with a monitor beside it, if one is named."""
    began, cpu = time.monotonic(), 0.0
    process = project.start_training(anew=True)
    watching = None
    if monitor:
        time.sleep(3)  # until there is something to see
        command = [sys.executable, "-m", "safetrain.cli", "monitor", *monitor]
        watching = subprocess.Popen(command, cwd=project.folder, env=project.environment, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if watching is not None and watching.poll() is None:
            times = psutil.Process(watching.pid).cpu_times()
            cpu = times.user + times.system
        time.sleep(0.5)
    done = project.finish(process)
    if done.code:
        raise RuntimeError(done.out[-2000:])
    wall = time.monotonic() - began
    if watching is not None:
        watching.wait(timeout=60)
    return Trained(project, wall, cpu)


if __name__ == "__main__":
    main()

"""Training, evaluation and answers by threads of the BLAS, alone and beside busy programs.

    python -m benchmarks.bench_threads [--quick] [--before FOLDER]

A busy program is a Python loop: it takes one core as long as something runs. All ways of a line run one after the
other, so that compare well on a machine with other work; a quiet one gives the seconds. ``--before``: another
checkout of this program, whose stages run beside. For fewer cores: ``taskset -c 0 python -m ...``.
"""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.bench_stream import SHAPES
from benchmarks.machine import show_result, write_result
from benchmarks.quantized_model import write_quantized_model
from benchmarks.throughput_cases import MIDDLE, ROOT
from safetrain.core.memory.terms import THREADS, usable_cores

STEPS, QUESTIONS, TOKENS, ROUNDS = 100, 220, 8, 3
MODELS = {"91M": MIDDLE, "0.5B": SHAPES["0.5b"]}
ROWS = (1, 32)  # answers at a time
UPDATE = 4, 128  # rows and tokens of an update
Took = tuple[float, float]  # seconds by the clock, and of the processors
NOTES = (
    f"{usable_cores()} cores. planned: as the program decides; one: {THREADS}=1; all: as many as there are cores, for "
    "answers too. Seconds of a training are those of its updates, CPU seconds those of the whole stage. "
    f"Example: {STEPS} steps, {QUESTIONS} questions for both models. Update: {UPDATE[0]} x {UPDATE[1]} tokens.",
    "Other load: the load average of the last minute at the end, without the busy programs; a process that is measured "
    "adds one or two to it. Above that, other programs ran, and only ratios within a line's group say something.",
)


@contextlib.contextmanager
def beside(programs: int) -> Iterator[None]:
    """Keep so many cores busy inside."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def run(program: Path, folder: Path, stage: str, *values: str, **variables: str) -> Took:
    """Run a stage of a checkout in ``folder``."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", f"stages.{stage}", *values], cwd=folder, stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(program), "SAFETRAIN_CACHE_DIR": str(folder / "cache"), **variables},
    )  # fmt: skip
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, stage)
    return time.perf_counter() - began, used.ru_utime + used.ru_stime


def project(program: Path, folder: Path, limits: dict[str, int]) -> Path:
    """The example, planned on this machine."""
    folder.mkdir()
    for name in ("conf", "data", "models"):
        shutil.copytree(program / name, folder / name)
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(program / name, folder / name)
    (folder / "limits.json").write_text(json.dumps(limits))
    for stage in ("validate_data", "preflight", "recommend_config"):
        run(program, folder, stage, f"train.max_steps={limits['steps']}")
    return folder


def stages(program: Path, planned: Path, way: dict[str, str]) -> dict[str, Took]:
    """The training, in the seconds of its updates, and the evaluation as a whole, in a copy of a planned project."""
    limits = json.loads((planned / "limits.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        folder = shutil.copytree(planned, Path(scratch) / "project")
        _, used = run(program, folder, "train", f"train.max_steps={limits['steps']}", **way)
        summary = json.loads((folder / "checkpoints_qlora" / "training_summary.json").read_text())
        values = f"train.max_steps={limits['steps']}", f"evaluate.max_examples={limits['questions']}"
        return {
            "train": (summary["elapsed_seconds"], used),
            "evaluate": run(program, folder, "evaluate", *values, **way),
        }


def model(folder: Path, threads: int) -> dict[str, Took]:
    """Answers and an update of a model in this process: the fastest of some rounds."""
    from safetrain.engine.cpu.blas import load_fast_blas, use_threads

    load_fast_blas()
    import mlx.core as mx
    import numpy as np

    from safetrain.core.data.token_rows import TokenRows, token_row
    from safetrain.engine import model as engine
    from safetrain.engine.batches import training_layout, update_of_rows
    from safetrain.engine.evaluation import answer
    from safetrain.engine.update import prepare
    from tests.support.settings import SETTINGS

    use_threads(threads)
    engine.LEAST_SHARED = 0  # answers take all threads
    base, gradients = prepare(folder, SETTINGS)
    draw, found = np.random.default_rng(5), dict[str, list[Took]]()
    data = TokenRows.of([token_row(draw.integers(5, 2000, UPDATE[1]).tolist(), [True] * UPDATE[1])] * UPDATE[0])
    update = update_of_rows(data, [list(range(UPDATE[0]))], training_layout(base, UPDATE[0], data))
    prompts = draw.integers(5, 2000, (max(ROWS), 12)).tolist()

    def step() -> None:
        base.module.train()
        mx.eval(*gradients.of(update, 0))

    work: dict[str, Callable[[], object]] = {"update": step}
    for rows in ROWS:
        work[f"{rows} x {TOKENS} tokens"] = functools.partial(answer, base, prompts[:rows], frozenset(), TOKENS, 10**6)
    for name, compute in work.items():
        for _ in range(ROUNDS):
            began, used = time.perf_counter(), time.process_time()
            compute()
            found.setdefault(name, []).append((time.perf_counter() - began, time.process_time() - used))
    return {name: min(each[1:]) for name, each in found.items()}


def in_a_process(folder: Path, threads: int) -> dict[str, Took]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_threads", "--model", str(folder), str(threads)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)


def lines(name: str, ways: Mapping[str, Callable[[], dict[str, Took]]], beside_of: Sequence[int]) -> list[list[object]]:
    """A line for each work and way; ``one`` without a neighbour is what all others are compared with."""
    rows, quiet = list[list[object]](), dict[str, float]()
    for programs in beside_of:
        with beside(programs):
            found = {way: measure() for way, measure in ways.items()}
        load = os.getloadavg()[0] - programs
        for work in found["one"]:
            quiet.setdefault(work, found["one"][work][0])
            for way, took in found.items():
                seconds, used = took[work]
                rows.append([
                    name, work, programs, way, f"{seconds:.2f}", f"{used:.2f}", f"{seconds / quiet[work]:.2f}",
                    f"{load:.1f}",
                ])  # fmt: skip
                print(*rows[-1], sep=" | ", flush=True)
    return rows


def main(arguments: list[str]) -> None:
    """Measure all, or one model in this process."""
    if arguments[:1] == ["--model"]:
        print(json.dumps(model(Path(arguments[1]), int(arguments[2]))))
        return
    short, rows = "--quick" in arguments, list[list[object]]()
    limits = {"steps": 20, "questions": 40} if short else {"steps": STEPS, "questions": QUESTIONS}
    programs = {"planned": ROOT}
    if "--before" in arguments:
        programs["before"] = Path(arguments[arguments.index("--before") + 1]).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        ways = dict[str, Callable[[], dict[str, Took]]]()
        for way, program in programs.items():
            planned = project(program, Path(scratch) / way, limits)
            ways[way] = functools.partial(stages, program, planned, {})
        ways["one"] = functools.partial(stages, ROOT, Path(scratch) / "planned", {THREADS: "1"})
        rows += lines("3M, the example", ways, (0, 1) if short else (0, 1, 2))
        for name, shape in {} if short else MODELS.items():
            folder = write_quantized_model(Path(scratch) / name, **shape)
            each = {"one": functools.partial(in_a_process, folder, 1)}
            each["all"] = functools.partial(in_a_process, folder, usable_cores())
            rows += lines(name, each, (0, 1))
    header = ["model", "work", "busy programs", "threads", "seconds", "CPU seconds", "of one alone", "other load"]
    (show_result if short else write_result)("bench_threads", "Threads of the BLAS", header, rows, NOTES)


if __name__ == "__main__":
    main(sys.argv[1:])

"""100,000 and 1,000,000 chat rows: validated and tokenized once, next to the tokenizer library alone.

`python -m benchmarks.bench_validate [ROWS …]` (default 100000 1000000). Needs some 15 GB of disk for the million.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import write_result

ROOT = Path(__file__).resolve().parent.parent
BATCH = 1000  # texts that the library tokenizes at a time
COMMON = "the of and to in a is that for it as was with be by on not he this are or his from at"
ALONE = """
import json, resource, sys, time
from pathlib import Path
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.data.forms import parse_row
from safetrain.data.render import Renderer
tokenizer = ChatTokenizer(Path(sys.argv[1]))
renderer, library = Renderer(tokenizer.template, tokenizer.controls, ""), tokenizer.backend
seconds = tokens = 0
texts = []
def tokenize():
    global seconds, tokens
    began = time.perf_counter()
    encodings = library.encode_batch(texts, add_special_tokens=False)
    ids = [encoding.ids for encoding in encodings]
    seconds += time.perf_counter() - began
    tokens += sum(map(len, ids))
    texts.clear()
for line in open(sys.argv[2], encoding="utf-8"):
    texts.append(renderer.render(parse_row(json.loads(line))).text)
    if len(texts) == int(sys.argv[3]):
        tokenize()
if texts:
    tokenize()
print(json.dumps([seconds, tokens]))
"""


@dataclass(frozen=True)
class Run:
    """A process that was measured."""

    seconds: float
    peak_bytes: int  # resident, of the process and its largest child
    printed: str


def main(counts: list[int]) -> None:
    """Each number of rows in a fresh project."""
    rows: list[list[object]] = []
    for count in counts:
        with tempfile.TemporaryDirectory() as scratch:
            project = clone(Path(scratch))
            data = project / "data" / "many"
            data.mkdir()
            write_rows(data / "train.jsonl", count, 7)
            for name, few in (("valid", 4), ("test", 100)):
                write_rows(data / f"{name}.jsonl", few, len(name))
            alone, tokens = library_alone(project, data / "train.jsonl")
            done = stage(project, "validate_data", "data.path=data/many")
            report = json.loads((project / "checkpoints_qlora/data_report.json").read_text())
            size = (data / "train.jsonl").stat().st_size / 2**20
            rows.append([
                f"{count:,}", f"{size:,.0f} MiB", f"{tokens / 1e6:.1f} M", report["train"]["lengths"]["p50"],
                f"{alone:.1f} s", f"{done.seconds:.1f} s", f"{done.seconds / alone:.2f}",
                f"{done.peak_bytes / 2**20:,.0f} MiB",
            ])  # fmt: skip
    header = [
        "rows", "file", "tokens", "median", "library alone, in batches", "validate_data", "ratio", "peak memory"
    ]  # fmt: skip
    write_result("bench_validate", "Validating and tokenizing once", header, rows)


def clone(scratch: Path) -> Path:
    """This project as it stands, without its environment and results."""
    project = scratch / "project"
    project.mkdir()
    for name in ("conf", "data", "models", "stages", "safetrain", "benchmarks", "tests", "params.yaml", "dvc.yaml"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(project / name)], check=True)
    return project


def write_rows(path: Path, count: int, seed: int) -> None:
    """Chats of one to three turns, of the example's words and common English ones; lengths log-normal, median 270."""
    draw = random.Random(seed)
    example = [json.loads(line)["messages"] for line in (ROOT / "data/example/train.jsonl").read_text().splitlines()]
    words = [word for messages in example for message in messages for word in message["content"].split()]
    words += COMMON.split() * 1000
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            turns = draw.choice((1, 1, 1, 2, 3))
            left = min(int(draw.lognormvariate(4.55, 0.6)), 330)
            messages = [{"role": "system", "content": "You are a helpful assistant."}] if number % 3 == 0 else []
            for _ in range(turns):
                asked = " ".join(draw.choices(words, k=max(3, left // (3 * turns))))
                said = " ".join(draw.choices(words, k=max(3, left // turns)))
                messages.append({"role": "user", "content": f"{asked} {number}?"})
                messages.append({"role": "assistant", "content": f"{said}."})
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def library_alone(project: Path, data: Path) -> tuple[float, int]:
    """Seconds that the tokenizer library takes for the same texts in batches, on all cores; tokens."""
    command = [sys.executable, "-c", ALONE, "models/encyclopedia-3m", str(data), str(BATCH)]
    seconds, tokens = json.loads(run(command, project).printed)
    return seconds, tokens


def stage(project: Path, name: str, *overrides: str) -> Run:
    """One stage as a person runs it."""
    return run([sys.executable, "-m", f"stages.{name}", *overrides], project)


def run(command: list[str], project: Path) -> Run:
    """A command in the project, with its time and its peak."""
    environment = {**os.environ, "PYTHONPATH": str(project), "SAFETRAIN_LOCK_DIR": str(project.parent)}
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=project, env=environment, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        output.seek(0)
        printed = output.read()
    if status:
        raise SystemExit(f"{' '.join(command[:4])} ended with status {status}")
    return Run(seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), printed)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main([int(word) for word in sys.argv[1:]] or [100_000, 1_000_000])

"""A corpus of 1 GB of tokens: validated, opened, its updates made, and the memory of that.

`python -m benchmarks.bench_corpus [TOKENS] [DOCUMENTS]` (default 500 million in a million documents). Each measurement
is a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import write_result
from safetrain.core.data.row_order import Cursor, rows_at
from safetrain.core.data.training_rows import load_training_rows
from safetrain.core.storage import paths
from tests.conftest import EMBEDDED
from tests.corpora import write_ids

TOKENS, DOCUMENTS, FILES = 500_000_000, 1_000_000, 4
UPDATES, ROWS, LENGTH, SEED = 1000, 8, 2048, 7
VOCABULARY, END = 2048, 0


def main(tokens: int, documents: int) -> None:
    """Write the corpus, validate it, open it, train on nothing."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_CORPUS_FOLDER")) as scratch:
        folder = Path(scratch)
        write_corpus(folder / "corpus", tokens, documents)
        validated, made = child(folder, "validate"), child(folder, "updates")
        size = sum(path.stat().st_size for path in (folder / "corpus").glob("*.ds"))
        tables = sum(path.stat().st_size for path in (folder / paths.VALIDATED).iterdir())
    rows: list[list[object]] = [
        ["corpus", f"{tokens:,} tokens, {documents:,} documents, {FILES} files, {size / 1e9:.2f} GB"],
        ["validated", f"{validated['seconds']:.1f} s, peak {validated['peak'] / 2**20:,.0f} MiB resident"],
        ["written beside it", f"{tables / 2**20:.1f} MiB"],
        ["opened, first update's rows there", f"{made['opened']:.2f} s, without imports"],
        [f"{UPDATES} updates of {ROWS} windows of {LENGTH} tokens", f"{made['seconds']:.2f} s"],
        ["a second", f"{made['windows']:,.0f} windows, {made['tokens'] / 1e6:,.1f} M tokens"],
        ["private memory before opening", f"{made['before'] / 2**20:.1f} MiB"],
        ["after the first update", f"{made['first'] / 2**20:.1f} MiB"],
        [f"after {UPDATES} updates", f"{made['last'] / 2**20:.1f} MiB"],
    ]
    notes = [
        "Private memory is what the process has for itself (Linux: RssAnon); pages of mapped files can be taken back "
        "at any time. Windows come in the order of a training, spread over the whole corpus. Ids are random numbers.",
    ]
    write_result("bench_corpus", "A corpus of tokens that stays where it is", ["", ""], rows, notes)


def write_corpus(folder: Path, tokens: int, documents: int) -> None:
    """Random ids in documents of random lengths, each closed."""
    generator = np.random.default_rng(SEED)
    for number in range(FILES):
        borders = np.sort(generator.choice(tokens // FILES - 1, documents // FILES - 1, replace=False)) + 1
        ends = np.append(borders, tokens // FILES)
        ids = generator.integers(300, VOCABULARY, tokens // FILES, dtype=np.uint16)
        ids[ends - 1] = END
        write_ids(folder / f"{number:05d}_train.ds", ids, ends)


def child(folder: Path, what: str) -> dict[str, float]:
    """What a process of its own prints."""
    command = [sys.executable, "-m", "benchmarks.bench_corpus", what]
    found = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=environment())
    return dict(json.loads(found.stdout.splitlines()[-1]))


def environment() -> dict[str, str]:
    """With this folder's modules, wherever it is run."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}


def validate() -> dict[str, float]:
    """Validate the corpus of this folder."""
    from safetrain.data.findings import Severities
    from safetrain.data.tokenize import DataSettings
    from safetrain.data.validate import validate as validate_data

    began = time.perf_counter()
    settings = DataSettings(severities=Severities(("TOKENIZER-DIFFERS",)), shares={"valid": 0.01, "test": 0.01})
    validate_data([Path("corpus")], EMBEDDED, settings, paths.VALIDATED)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak": own_bytes("VmHWM")}


def updates() -> dict[str, float]:
    """Open what was validated, and make the rows of many updates."""
    before, began = own_bytes("RssAnon"), time.perf_counter()
    train = load_training_rows(EMBEDDED, None, LENGTH, method="pretrain").train
    tokens = 0

    def update(number: int) -> int:
        found = rows_at(train, Cursor(0, number), SEED, ROWS)
        return sum(int(found.data[row].ids.size) for row in found.rows)

    update(0)
    opened, first = time.perf_counter() - began, own_bytes("RssAnon")
    began = time.perf_counter()
    for number in range(UPDATES):
        tokens += update(number)
    seconds = time.perf_counter() - began
    return {
        "opened": opened, "seconds": seconds, "windows": UPDATES * ROWS / seconds, "tokens": tokens / seconds,
        "before": before, "first": first, "last": own_bytes("RssAnon"),
    }  # fmt: skip


def own_bytes(name: str) -> int:
    """What Linux says of this process: VmHWM, the most that was resident; RssAnon, what no file has now."""
    for line in Path("/proc/self/status").read_text().splitlines():  # a child's ru_maxrss has its parent's memory
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    asked = sys.argv[1:]
    if asked and asked[0] in ("validate", "updates"):
        print(json.dumps(validate() if asked[0] == "validate" else updates()))
    else:
        main(*(int(number) for number in [*asked, *map(str, (TOKENS, DOCUMENTS)[len(asked) :])]))

"""What the checks of the data gate cost, without tokenizing: rows a second, near copies, memory; each check alone.

`python -m benchmarks.bench_data_gate [ROWS …]` (default 200000 1000000).
"""

import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.machine import write_result
from safetrain.core.data.template import Controls
from safetrain.core.data.token_rows import TokenRow
from safetrain.core.data.words import words_of
from safetrain.data.checks import is_refusal, secrets, text_findings
from safetrain.data.compare import RowFacts, asked_text, compare, digests, shingles
from safetrain.data.files import rows_of
from safetrain.data.findings import Findings, Severities, Spot
from safetrain.data.forms import parse_row
from safetrain.data.json_rows import load
from safetrain.data.tokenize import ReadRow
from tests.support.made_texts import Maker

SAMPLE, BLOCK = 20_000, 512  # rows
PLANTED = 100  # one row in so many is a near copy of the one before it
SIMILARITY = 0.8


def main(counts: list[int]) -> None:
    """Each number of rows in a process of its own."""
    rows: list[list[object]] = []
    for count in counts:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "train.jsonl"
            planted = write_rows(path, count)
            size = path.stat().st_size / 2**20
            command = [sys.executable, "-m", "benchmarks.bench_data_gate", "--one", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        each_row = found["parse"] + found["words"] + found["survey"] + found["rest"]
        rows.append([
            f"{count:,}", f"{size:,.0f} MiB", f"{found['parse']:.1f} s", f"{found['words']:.1f} s",
            f"{found['survey']:.1f} s", f"{found['near']:.1f} s", f"{found['rest']:.1f} s", f"{count / each_row:,.0f}",
            f"{found['clock']:.0f} s", f"{found['copies']:,} of {planted:,}", f"{found['peak']:,.0f} MiB",
        ])  # fmt: skip
    header = [
        "rows", "file", "JSON to rows", "words of a row", "remembering", "near copies", "other checks of all rows",
        "rows/s without near copies", "all by the clock", "near copies found, planted", "peak memory",
    ]  # fmt: skip
    notes = [
        "Times are the processor's but for those by the clock, on a machine that others use too.",
        *alone(),
    ]
    write_result("bench_data_gate", "The checks of the data gate, without tokenizing", header, rows, notes)


def write_rows(path: Path, count: int) -> int:
    """Chats of the generator, some of them copied with another last word; how many."""
    maker, planted, before = Maker(11), 0, Maker(12).row()
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            row = maker.row()
            asked = before["messages"][0]["content"].split()
            if number % PLANTED == 1 and len(asked) >= 14:
                row["messages"][0]["content"] = " ".join([*asked[:-1], "instead?"])
                planted += 1
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            before = row
    return planted


def one(path: Path) -> None:
    """Print what each part took."""
    controls, findings, facts = Controls(None, frozenset()), Findings(Severities()), RowFacts([str(path)])
    clock = time.perf_counter()
    took = dict.fromkeys(("parse", "words", "survey", "near", "rest"), 0.0)
    tokens = TokenRow(np.zeros(100, dtype=np.uint32), np.ones(100, dtype=np.bool_))
    values = rows_of(path)
    while True:
        began = time.process_time()
        block = [(Spot(str(path), place), parse_row(value)) for place, value in itertools.islice(values, BLOCK)]
        if not block:
            break
        parsed = time.process_time()
        for spot, row in block:
            for identifier, detail in text_findings(row, controls):
                findings.add(identifier, detail, where=[spot])
        checked = time.process_time()
        facts.add([ReadRow(spot, row, None, tokens, ()) for spot, row in block], 0)
        took["parse"] += parsed - began
        took["words"] += checked - parsed
        took["survey"] += time.process_time() - checked
    began = time.process_time()
    sides = np.zeros(len(facts), dtype=np.uint8)
    likeness = facts.likeness(SIMILARITY)
    took["near"] = time.process_time() - began
    compare(findings, facts, likeness, sides)
    took["rest"] = time.process_time() - began - took["near"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    copies = int((likeness.clusters != likeness.groups).sum())
    print(json.dumps({**took, "copies": copies, "peak": peak, "clock": time.perf_counter() - clock}))


def alone() -> list[str]:
    """Microseconds a row of each check by itself."""
    maker, controls = Maker(13), Controls(None, frozenset())
    rows = [parse_row(load(json.dumps(maker.row(), ensure_ascii=False))) for _ in range(SAMPLE)]
    texts = ["\n\n".join(message.content for message in row.messages) for row in rows]
    answers = [row.messages[-1].content for row in rows]
    questions = [asked_text(row) for row in rows]
    blocks = [words_of(questions[start : start + 128]) for start in range(0, SAMPLE, 128)]
    parts: list[tuple[str, Callable[[], object]]] = [
        ("all checks of words", lambda: [text_findings(row, controls) for row in rows]),
        ("keys", lambda: [list(secrets(text)) for text in texts]),
        ("refusals", lambda: [is_refusal(text) for text in answers]),
        ("words of questions", lambda: [words_of(questions[at : at + 128]) for at in range(0, SAMPLE, 128)]),
        ("runs of five words and digests", lambda: [(shingles(words), digests(words)) for words in blocks]),
    ]
    found = ", ".join(f"{name} {_microseconds(part):.1f}" for name, part in parts)
    characters = sum(map(len, texts)) // SAMPLE
    return [f"Microseconds a row of {characters} characters, each check alone: {found}."]


def _microseconds(part: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        part()
        best = min(best, time.process_time() - began)
    return best / SAMPLE * 1e6


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]))
    else:
        main([int(word) for word in sys.argv[1:]] or [200_000, 1_000_000])

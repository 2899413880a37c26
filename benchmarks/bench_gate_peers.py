"""200,000 generated chats with planted faults: what safetrain, Soup and a plain loop over `datasets` find, and when.

`python -m benchmarks.bench_gate_peers PYTHON [ROWS]`: PYTHON is that of an environment with `soup-cli[data,train]` and
`datasets`. Soup's commands are the ones for the faults: doctor, validate, dedup, pii and decontaminate.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench_data_gate import write_rows
from benchmarks.machine import write_result
from tests.support.made_texts import Chat, Maker

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "encyclopedia-3m"
TEST_ROWS, COPIES, LEAKS, NEAR_LEAKS, BROKEN, KEYS, MAILS = 2000, 500, 200, 100, 300, 100, 100
LOOP = """
import sys
from datasets import load_dataset
found = load_dataset("json", data_files={"train": sys.argv[1], "test": sys.argv[2]})
rows, seen = 0, set()
for row in found["train"]:
    seen.add(str(row["messages"]))
    rows += 1
asked = {row["messages"][0]["content"] for row in found["train"]}
print("copies", rows - len(seen), "leaks", sum(row["messages"][0]["content"] in asked for row in found["test"]))
"""


@dataclass(frozen=True)
class Done:
    """A command that was run."""

    seconds: float
    processor: float  # seconds of all its threads
    said: str


def main(python: Path, count: int) -> None:
    """Make the data, run everybody, write the table."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        near = make(folder, count)
        rows = [[*_ours(folder)], [*_loop(python, folder)], *_soup(python, folder)]
    planted = [f"planted in {count:,} rows", "", "", COPIES, near, LEAKS, NEAR_LEAKS, BROKEN, KEYS, MAILS]
    header = [
        "", "seconds", "of the processor", "exact copies", "near copies", "test rows asked in train",
        "nearly asked", "wrongly decoded", "keys", "e-mail addresses",
    ]  # fmt: skip
    notes = [
        "–: not looked for. Others use the machine too: compare the seconds of the processor. Every command of Soup "
        "reads the file again; doctor looks at 200 rows.",
        "safetrain: `safetrain validate FOLDER`, which also renders and tokenizes each row for the model.",
        "Soup's dedup counts exact and near copies together, by question and answer. Its decontaminate counts rows of "
        "train, exact and near ones together. Its pii flags rows by patterns of addresses, "
        "phones, SSNs and cards; 100 rows were planted.",
        f"Versions: {_versions(python)}.",
    ]
    write_result("bench_gate_peers", "Planted faults: what is found, and how fast", header, [planted, *rows], notes)


def make(folder: Path, count: int) -> int:
    """Write train.jsonl and test.jsonl; how many near copies stand in train."""
    path, draw, maker = folder / "train.jsonl", random.Random(5), Maker(17)
    near = write_rows(path, count)
    lines = path.read_text(encoding="utf-8").splitlines()
    places = iter(draw.sample(range(0, count, 2), COPIES + BROKEN + KEYS + MAILS + LEAKS + NEAR_LEAKS))
    chats = [json.loads(line) for line in lines]
    lines += [lines[next(places)] for _ in range(COPIES)]
    asked = [_question(chats[next(places)]) for _ in range(LEAKS)]
    asked += [" ".join([*_question(chats[next(places)]).split()[:-1], "now?"]) for _ in range(NEAR_LEAKS)]
    for _ in range(BROKEN):
        _append(chats[place := next(places)], " " + "É difícil, não há opção.".encode().decode("latin-1"))
        lines[place] = json.dumps(chats[place], ensure_ascii=False)
    for number in range(KEYS + MAILS):
        _append(chats[place := next(places)], _key(draw) if number < KEYS else f" Ask rui.costa{number}@gmail.com.")
        lines[place] = json.dumps(chats[place], ensure_ascii=False)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tests = [maker.row() for _ in range(TEST_ROWS)]
    for chat, question in zip(tests, asked, strict=False):
        chat["messages"][0]["content"] = question
    (folder / "test.jsonl").write_text(
        "".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in tests), encoding="utf-8"
    )
    (folder / "asked.jsonl").write_text(  # what Soup's decontaminate takes: a text on each line
        "".join(json.dumps({"text": _question(chat)}, ensure_ascii=False) + "\n" for chat in tests), encoding="utf-8"
    )
    return near


def _question(chat: Chat) -> str:
    return chat["messages"][0]["content"]


def _append(chat: Chat, words: str) -> None:
    chat["messages"][1]["content"] += words


def _key(draw: random.Random) -> str:
    return " It is gh" + "p_" + "".join(draw.choices("abcdefghkmnpqrstuvwxyzABCDEFGH23456789", k=36))


def _ours(folder: Path) -> list[object]:
    data = folder / "ours"
    data.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        os.link(folder / name, data / name)
    done = run([sys.executable, "-m", "safetrain.cli", "validate", str(data), "--model", str(MODEL), "--json"], folder)
    counts = dict.fromkeys(("QUESTION-IN-TEST", "NEAR-COPIES", "SPLITS-OVERLAP", "MOJIBAKE", "SECRETS"), 0)
    counts |= {"REPEATED-ROWS": 0}
    for finding in json.loads(done.said)["findings"]:
        counts[finding["id"]] = counts.get(finding["id"], 0) + finding["count"]
    found = ("REPEATED-ROWS", "NEAR-COPIES", "QUESTION-IN-TEST", "SPLITS-OVERLAP", "MOJIBAKE", "SECRETS")
    return [*_line("safetrain validate", done), *(counts[name] for name in found), "–"]


def _loop(python: Path, folder: Path) -> list[object]:
    done = run([str(python), "-c", LOOP, str(folder / "train.jsonl"), str(folder / "test.jsonl")], folder)
    copies, leaks = re.findall(r"(?:copies|leaks) (\d+)", done.said)
    return [*_line("a loop over datasets", done), copies, "–", leaks, "–", "–", "–", "–"]


def _soup(python: Path, folder: Path) -> list[list[object]]:
    """One line for each of its commands; a figure stands where it looks for the fault."""
    commands: list[tuple[Sequence[str], str, int]] = [  # what to run, where the figure stands, in which column
        (("doctor", "train.jsonl", "--model", str(MODEL)), "", 0),
        (("validate", "train.jsonl"), r"(\d+) duplicate rows", 0),
        (("dedup", "train.jsonl"), r"-\s*(\d+)\s+duplicates", 1),
        (("decontaminate", "-i", "train.jsonl", "--benchmark-file", "asked.jsonl"), r"Removed:\s+(\d+)", 2),
        (("pii", "-i", "train.jsonl"), r"Flagged:\s+(\d+)", 6),
    ]
    rows = []
    for words, pattern, column in commands:
        done = run([str(python.parent / "soup"), "data", *words], folder)
        print(f"soup data {' '.join(words)}:\n{done.said}")
        match = re.search(pattern, done.said) if pattern else None
        cells: list[object] = ["–"] * 7
        if pattern:
            cells[column] = next(filter(None, match.groups())) if match else "see its words"
        rows.append([*_line(f"soup data {words[0]}", done), *cells])
    return rows


def _line(name: str, done: Done) -> list[object]:
    return [name, f"{done.seconds:.1f}", f"{done.processor:.1f}"]


def run(command: Sequence[str], folder: Path) -> Done:
    """A command in ``folder``, with what it says."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    with (folder / "said").open("w+", encoding="utf-8") as said:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT, env=environment)
        _, _, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = 0
        said.seek(0)
        words = said.read()
    processor = usage.ru_utime + usage.ru_stime
    print(f"{seconds:.0f} s, {processor:.0f} s of the processor: {' '.join(command)[:200]}", flush=True)
    return Done(seconds, processor, words)


def _versions(python: Path) -> str:
    code = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('soup-cli', 'datasets')), sep=', ')"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]) if sys.argv[2:] else 200_000)

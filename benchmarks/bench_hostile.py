"""Over a thousand hostile inputs, drawn from a seed: each must end with a result or an error in words.

``python -m benchmarks.bench_hostile [--cases N] [--seed 1] [--only KIND[:NUMBER]]``

Each case runs a real command in a copy of a small finished project, in a process of its own. Wrong is a traceback, more
than 2 GB of memory, more than 60 s of CPU (or three times that by the clock), or an end by a signal.
"""

import argparse
import contextlib
import csv
import ctypes
import faulthandler
import importlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet
import yaml

from benchmarks import hostile_words as hostile
from benchmarks.machine import show_result, write_result
from tests.support.chaos.project import Project, end, scratch_folder

ROOT, FORK = Path(__file__).resolve().parent.parent, get_context("fork")
MOST_BYTES, KILL_BYTES, MOST_SECONDS, AT_ONCE = 2 * 10**9, 2.4 * 10**9, 60.0, 3
PRELOADED = ("safetrain.cli", "hydra", "jinja2", "pyarrow.parquet", "pyarrow.csv", "tokenizers", "transformers.utils",
             "transformers.models.auto", "transformers.tokenization_utils_tokenizers", "numpy")  # fmt: skip
HELD = "within the bars"
VERDICTS = (HELD, "traceback", "memory", "> 60 s", "signal")
MODEL, DATA, OUTPUT, FIRST = Path("models/tiny"), Path("data/hostile"), Path("checkpoints_qlora"), Path("first")
CONFIG, WEIGHTS, TALK = MODEL / "config.json", MODEL / "model.safetensors", MODEL / "tokenizer_config.json"
Words = tuple[str, ...]
Change = Callable[[Random, int], Words]  # changes the project in the working directory; gives words for "@"


class Case(NamedTuple):
    """An input by its kind, its number and the seed."""

    kind: str
    number: int
    seed: int


class Outcome(NamedTuple):
    """How a case ended."""

    case: Case
    what: str
    said: str
    verdict: str
    cause: str
    last_line: str
    seconds: float
    peak_bytes: int


# Files

GOOD: dict[str, Any] = {  # of files that the project does not have
    "hosts.json": {"backend": "ring", "hosts": [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2},
    f"{WEIGHTS.name}.index.json": {"metadata": {"total_size": 9}, "weight_map": {"a.b": WEIGHTS.name, "b": ""}},
    "": {"eos_token_id": [0, 1], "eos_token": "<|end|>", "chat_template": "{{ messages }}", "<|new|>": 2047},
}  # fmt: skip
SPECIAL: dict[str, Callable[[Path], object]] = {
    "removed": str, "folder": Path.mkdir, "empty": Path.touch, "FIFO": os.mkfifo,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "loop": lambda path: path.symlink_to(path.name), "link to itself": lambda path: path.symlink_to("."),
    "zeros": lambda path: path.symlink_to("/dev/zero"), "broken link": lambda path: path.symlink_to("/nowhere"),
    "null": lambda path: path.symlink_to("/dev/null"), "full": lambda path: path.symlink_to("/dev/full"),
}  # fmt: skip


def mutated(draw: Random, value: Any) -> Any:
    """The value with one place of another type, size or meaning."""
    way = draw.random()
    if isinstance(value, (dict, list)) and value and draw.random() < 0.9:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if way < 0.05:
            del value[key]
        elif way < 0.1 and isinstance(value, dict):
            value[draw.choice(hostile.KEYS)] = value.pop(key)
        else:
            value[key] = mutated(draw, value[key])
        return value
    if way < 0.2 and isinstance(value, (int, float)):
        return draw.choice((-value, value * 10**6, value + 1, value - 1, float(value), value / 3))
    return draw.choice(hostile.TYPES)(value) if way < 0.35 else deepcopy(draw.choice(hostile.EVIL))


def text_of(draw: Random, value: Any, dump: Callable[[Any], str] = json.dumps) -> bytes:
    """A document with one place changed, or several; some are damaged as bytes too."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        value = mutated(draw, value)
    text = dump(value)
    for mark, raw in hostile.RAW.items():
        text = text.replace(f'"{mark}"', raw).replace(f"'{mark}'", raw[:3000])
    encoded = text.encode("utf-8", "surrogatepass")
    return damaged(draw, encoded) if draw.random() < 0.15 else encoded


def damaged(draw: Random, raw: bytes) -> bytes:
    """The bytes cut, flipped, doubled, padded, or in another encoding."""
    begin, text = draw.randrange(len(raw) + 1), raw.decode(errors="replace")
    junk = draw.choice((b"\x00", b"\x1b[2J", b"\xff\xfe", b"\xed\xa0\x80", b"\x80", b"{", b"[" * 99_999, b'"', b"\r"))
    flipped = bytearray(raw)
    for _ in range(draw.choice((1, 20)) if raw else 0):
        flipped[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    return draw.choice((
        b"", raw[:begin], raw[begin:], bytes(flipped), raw[: begin + draw.choice((1, 10, 1000))] + raw[begin:], raw * 2,
        raw[:begin] + junk + raw[begin:], b"\xef\xbb\xbf" + raw, junk, raw.replace(b"e", b"\xe9"), b"\x00" * 10**6,
        b"version https://git-lfs.github.com/spec/v1\n", *(text.encode(f"utf-{each}") for each in (16, "16-le", 32)),
        b" " * 10**7 + raw, raw + b"\n" * 10**6,
    ))  # fmt: skip


def spoil(path: Path, draw: Random) -> None:
    """Another file in the place of this one."""
    raw, suffix = path.read_bytes() if path.is_file() else b"", path.suffix
    if draw.random() < 0.04:
        path.unlink(missing_ok=True)
        SPECIAL[draw.choice(list(SPECIAL))](path)
    elif suffix == ".safetensors":
        path.write_bytes(spoiled_weights(draw, raw))
    elif suffix == ".jsonl":
        path.write_bytes(b"\n".join(text_of(draw, json.loads(line)) for line in raw.splitlines() if line))
    elif suffix == ".json":
        good = json.loads(raw) if raw else GOOD.get(path.name, GOOD[""])
        if path.name in hostile.VALUES and draw.random() < 0.3:
            keys, values = hostile.VALUES[path.name]
            path.write_text(json.dumps(good | {draw.choice(keys): draw.choice(values)}))
        else:
            path.write_bytes(text_of(draw, good))
    elif suffix == ".yaml" and draw.random() < 0.75:
        other = draw.choice(hostile.WHOLE).encode() if draw.random() < 0.33 else b""
        path.write_bytes(other or text_of(draw, yaml.safe_load(raw), yaml.safe_dump))
    else:
        path.write_bytes(damaged(draw, raw))


def spoiled_weights(draw: Random, raw: bytes) -> bytes:
    """A safetensors file with another header; or with one that is well-formed and wrong; or with wrong values."""
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    names, sizes = [name for name in header if name != "__metadata__"], (0, 1, length - 1, 10**6, 2**31, 2**64 - 1)
    if draw.random() < 0.5:
        text = text_of(draw, header)
        return draw.choice((*sizes, *[len(text)] * 20)).to_bytes(8, "little") + text + body
    one, other, way = header[draw.choice(names)], draw.choice(names), draw.randrange(7)
    shapes = [*one["shape"], 1], one["shape"][::-1], [draw.choice((0, -1, 2**31, 2**62)), *one["shape"]]
    if way < 3:
        one["shape"] = shapes[way]
    elif way == 3:
        body[slice(*one["data_offsets"])] = b"\xff" * (one["data_offsets"][1] - one["data_offsets"][0])
    elif way == 4:
        header[f"{other}_b"] = header.pop(other)
    elif way == 5:
        one["data_offsets"] = header[other]["data_offsets"]
    else:
        one["dtype"] = draw.choice(("F16", "I32", "F64", "BOOL", "F8_E4M3", "F32", "U8", "C64"))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def spoiled(*names: Path | str) -> Change:
    """One of these files is another."""

    def change(draw: Random, _number: int) -> Words:
        found = [path for name in names for path in (sorted(Path().glob(str(name))) or [Path(name)])]
        path = draw.choice(found)
        spoil(path, draw)
        return (path.name,)

    return change


# Data

HITS: dict[str, Callable[[Path], object]] = {  # while it is read
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2), "empty": lambda path: os.truncate(path, 0),
    "removed": Path.unlink, "more": lambda path: path.open("ab").write(b"\x00junk" * 10**5),
    "other": lambda path: path.open("r+b").write(b"\x00junk" * 10**5),
}  # fmt: skip


def put(form: str, rows: Any, lines: bytes = b"") -> Words:
    """The data file: rows or a table; ``lines`` where the format cannot hold them."""
    path, codec = Path(f"{DATA}.{form}"), {"jsonl.gz": "gzip", "jsonl.zst": "zstd"}.get(form)
    path.write_bytes(pa.compress(lines, codec, asbytes=True) if codec else lines)
    with contextlib.suppress(pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
        if form in ("csv", "tsv") and rows:
            text = [list(rows[0]), *(list(row.values()) for row in rows)]
            with path.open("w", newline="") as file:
                csv.writer(file, delimiter="," if form == "csv" else "\t").writerows(text)
        elif form in ("parquet", "arrow", "stream"):
            table = pa.Table.from_pylist(rows) if isinstance(rows, list) else rows
            if form == "parquet":
                pyarrow.parquet.write_table(table, path)
            else:
                with (pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream)(path, table.schema) as writer:
                    writer.write_table(table)
    return (str(path),)


def bomb(form: str, kind: str, size: int, rows: int) -> Words:
    """A small table that is large when it is read, or whose times Python's dates do not reach."""
    zeros = pa.nulls(rows, pa.int32()).fill_null(0)
    if kind == "cells":
        column = pa.DictionaryArray.from_arrays(zeros, pa.array(["word " * (size // 5)]))
    elif kind in ("equal", "null"):
        column = zeros.cast("string") if kind == "equal" else pa.nulls(rows, pa.string())
    else:
        column = pa.array([size], "int32" if kind == "date32" else "int64").cast(kind)
    return put(form, pa.table({"text": column, **({"prompt": ["a"], "completion": ["b"]} if rows == 1 else {})}))


def by_hand(_draw: Random, number: int) -> Words:
    """A data file that is large, deep, or none."""
    bombs = [(form, *each) for form in ("parquet", "arrow", "stream") for each in hostile.BOMBS
             if form == "parquet" or each[2] < 10**6]  # fmt: skip
    if number < len(bombs):
        return bomb(*bombs[number])
    if (number := number - len(bombs)) < len(hostile.REPEATED):
        form, head, body, times, tail = list(hostile.REPEATED.values())[number]
        return put(form, [], (head + body * times + tail).encode())
    list(SPECIAL.values())[(number - len(hostile.REPEATED)) % len(SPECIAL)](Path(f"{DATA}.jsonl"))
    return (f"{DATA}.jsonl",)


def rows(draw: Random, _number: int) -> Words:
    """A data file of changed rows."""
    form, some = draw.choice(hostile.FORMATS), [draw.choice(hostile.ROWS)] * draw.choice((1, 3, 40))
    some = json.loads(json.dumps(some))
    lines = text_of(draw, some) if form == "json" else b"\n".join(text_of(draw, row) for row in some)
    words = put(form, [mutated(draw, row) for row in some], lines)
    if draw.random() < 0.3:
        Path(words[0]).write_bytes(damaged(draw, Path(words[0]).read_bytes()))
    return words


def reading(draw: Random, number: int) -> Words:
    """A data file that changes while it is read."""
    some = [{"prompt": f"What is {n}?", "completion": f"{draw.random()}" * 20} for n in range(8000)]
    return put(("jsonl", "parquet", "arrow", "csv")[number % 4], some, "\n".join(map(json.dumps, some)).encode())


def template(draw: Random, number: int) -> Words:
    """A chat template: alone, or put somewhere into the good one."""
    sized = hostile.WITH_SIZE[number % len(hostile.WITH_SIZE)].format(n=10 ** draw.choice((3, 6, 7, 8, 10, 11)))
    source = sized if number % 2 else hostile.WITHOUT[number // 2 % len(hostile.WITHOUT)]
    settings = json.loads(TALK.read_text())
    good = settings["chat_template"]
    border = draw.choice([match.end() for match in re.finditer(r"[%}]\}", good)])
    new = good[:border] + source + good[border:]
    odd = ([{"name": "default", "template": source}], {"default": source}, [source], 3, [{"name": 1}])
    used = draw.choice((source, source, new, None, draw.choice(odd)))
    TALK.write_text(json.dumps(settings | {"chat_template": used}))
    if used is None:
        (MODEL / "chat_template.jinja").write_bytes(new.encode("utf-8", "surrogatepass"))
    return (source[:40],)


def command_line(draw: Random, number: int) -> Words:
    """A command with other words, or a setting."""
    if number % 2:
        known = yaml.safe_load(Path("params.yaml").read_text())
        setting = draw.choice([f"{section}.{key}" for section, keys in known.items() for key in keys])
        return *draw.choice((JOB, FLIGHT, "set")).split(), f"{setting}={draw.choice(hostile.WORDS)}"
    names = re.findall(r"`(--[\w-]+)", (ROOT / "docs/reference/commands.md").read_text())
    command, options = draw.choice(hostile.COMMANDS), list[str]()
    for _ in range(draw.choice((1, 2, 3))):
        name, value = draw.choice(names), draw.choice(hostile.WORDS)
        options += draw.choice(([value], [f"{name}={value}"], [name, value]))
    return (command, *options, *["--once"] * (command == "monitor"))


READ, CHECK, ASK = "validate @ --model models/tiny", "validate data/tiny", "ask hello --max-new-tokens 4"
PLAN, FLIGHT = "estimate models/tiny", "preflight preflight.level=quick"
JOB, TRAIN, BEGUN = "stages.preflight --cfg job", "stages.train", "train.from_adapter=first"
LOADED = ("preflight preflight.level=probe", "chat --base", "chat --compare", ASK)
STAGE = "stages.validate_data data.path=@ train.method="
READERS = ("result", "result --gate", "report", "diagnose", "diagnose --json", "runs", "monitor --once --plain", TRAIN,
           "monitor --once", "stages.plot", "stages.recommend_config", "discard")  # fmt: skip
ADAPTER = ("adapters.safetensors", "adapters.safetensors", "adapter_config.json", "adapter_config.json", "chat.json")
TOKENIZER = ("tokenizer", "tokenizer", TALK.stem, "generation_config", "added_tokens", "special_tokens_map",
             "chat_template")  # fmt: skip
KINDS: dict[str, tuple[int, tuple[str, ...], Change]] = {  # cases of a full run; commands; the change
    "by-hand": (60, (READ,), by_hand), "reading": (20, (READ,), reading),
    "rows": (200, (READ, f"{READ} --json", f"{READ} --show-mask=2", f"{READ} --fix out.jsonl", f"{STAGE}dpo",
                   f"{READ} --columns prompt=text", f"{STAGE}pretrain lora.rank=null lora.dropout=null"), rows),
    "weights": (140, (PLAN, CHECK, *LOADED), spoiled(WEIGHTS)),
    "config": (180, (PLAN, CHECK, FLIGHT, *LOADED), spoiled(CONFIG)),
    "index": (40, (PLAN, CHECK, FLIGHT, ASK), spoiled(f"{WEIGHTS}.index.json")),
    "tokenizer": (120, (CHECK, CHECK, ASK), spoiled(*(MODEL / f"{name}.json" for name in TOKENIZER))),
    "template": (110, (CHECK, CHECK, ASK), template),
    "adapter": (70, (ASK, "export peft out", "result"), spoiled(*(OUTPUT / "adapters" / name for name in ADAPTER))),
    "first": (70, ("ask hi --adapter first", f"{FLIGHT} {BEGUN}", f"stages.recommend_config {BEGUN}"),
              spoiled(*(FIRST / name for name in ADAPTER))),
    "record": (170, READERS, spoiled(*(OUTPUT / f"**/*.{end}" for end in ("json", "jsonl", "csv", "bin")))),
    "params": (70, (JOB, CHECK, "result", "estimate", "set train.seed=7", "report", TRAIN, "run", "update"),
               spoiled("params.yaml")),
    "command": (140, ("@",), command_line), "hosts": (20, (f"{FLIGHT} train.ranks=2",), spoiled("hosts.json")),
    "machine": (60, (CHECK, "result", "report", PLAN, FLIGHT, ASK, TRAIN),
                lambda _draw, number: (hostile.AROUND[number % len(hostile.AROUND)],)),
}  # fmt: skip
FULL = sum(share for share, _, _ in KINDS.values())


# Running


def command(words: Words, folder: Path, around: str = "") -> None:
    """Run the command in this process; with words for a shell before it, from nothing."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(folder)
    folder.with_suffix(".in").write_text("hello\n")
    for number, name in enumerate((".in", ".out", ".err")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(folder.with_suffix(name), flags, 0o600), number)
    os.environ |= {"HOME": str(folder), "SAFETRAIN_LOCK_DIR": str(folder), "TERM": "dumb"}
    faulthandler.enable()
    sys.argv = list(words) if words[0].startswith("stages.") else ["safetrain.cli", *words]
    sys.stdin = open(0)  # noqa: SIM115
    if around:
        for capability in (1, 2) if sys.platform == "linux" else ():  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # modes bind root too
        os.execv("/bin/sh", ["sh", "-c", f'{around}; exec "$@"', "sh", sys.executable, "-m", *sys.argv])
    importlib.import_module(sys.argv[0]).main()


def make(case: Case, folder: Path) -> None:
    """Change the project, always in the same way; write down what, and what then runs there."""
    os.chdir(folder)
    draw, (_, commands, change) = Random(f"{case.seed} {case.kind} {case.number}"), KINDS[case.kind]
    chosen, made = draw.choice(commands), change(draw, case.number)
    words = [each for word in chosen.split() for each in (made if word == "@" else [word.replace("@", made[0])])]
    folder.with_suffix(".case").write_text(json.dumps([" ".join(made), words]))


def forked(call: Callable[..., object], *arguments: Any) -> None:
    """Do this in another process: mlx does not survive a fork, so it is not in this one."""
    process = FORK.Process(target=call, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{call} {arguments} ended with {process.exitcode}")


def run(good: Path, case: Case) -> Outcome:
    """Run a case in a copy of a good project, and judge it."""
    folder, limit, hit = good.parent.with_name(f"{case.kind}-{case.number}"), "", case.kind != "reading"
    shutil.copytree(good, folder, symlinks=True)
    forked(make, case, folder)
    name, words = json.loads(folder.with_suffix(".case").read_text())
    process = FORK.Process(target=command, args=(words, folder, name if case.kind == "machine" else ""))
    process.start()
    pid, began = process.pid or 0, time.monotonic()
    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        wall, memory, cpu = time.monotonic() - began, 0, 0.0
        time.sleep(min(0.2, 0.02 + wall / 10))
        if not hit and wall > 0.4 + 0.1 * (case.number % 7):
            hit = True
            with contextlib.suppress(OSError):
                list(HITS.values())[case.number % len(HITS)](folder / words[1])
        with contextlib.suppress(psutil.Error):
            for each in (first := psutil.Process(pid), *first.children(recursive=True)):
                memory, cpu = memory + each.memory_info().rss, cpu + sum(each.cpu_times()[:2])
        if not limit and (memory > KILL_BYTES or cpu > MOST_SECONDS or wall > 3 * MOST_SECONDS):
            limit = "memory" if memory > KILL_BYTES else "> 60 s"
            os.kill(pid, signal.SIGABRT)  # with its stack
            time.sleep(0.2)
            end(pid)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    said = folder.with_suffix(".err").read_text(errors="replace")
    shutil.rmtree(folder, ignore_errors=True)
    peak = ended[2].ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    judged = judge(limit or "memory" * (peak > MOST_BYTES), os.waitstatus_to_exitcode(ended[1]), said)
    what = f"`{' '.join(words)[:120]}` with {name[:80]!r}"
    return Outcome(case, what, said[-6000:], *judged, time.monotonic() - began, peak)


def judge(limit: str, code: int, stderr: str) -> tuple[str, str, str]:
    """The verdict, its cause, and the last line."""
    said, fatal, stacks = stderr.partition("Fatal Python error")
    last = next((line.strip()[:160] for line in reversed(said.splitlines()) if line.strip()), "")
    verdict = limit or ("signal" if code < 0 else "traceback" if "Traceback (most recent call last)" in said else HELD)
    dump = stacks.rpartition("hread 0x")[2] if fatal else said  # the first thread is the last there
    frames = re.findall(r'File ".*?((?:safetrain|stages)/[\w/]+\.py)", line (\d+)', dump)
    where = ":".join(frames[0 if fatal else -1]) if frames else "?"
    what = {"traceback": last.partition(":")[0][:40], "signal": f"signal {-code}"}.get(verdict, verdict)
    return verdict, "" if verdict == HELD else f"{what} at {where}", last


def good_project(parent: Path) -> Path:
    """A small project with a finished run."""
    folder = parent / "project"
    os.environ |= {"SAFETRAIN_CACHE_DIR": str(parent / "cache"), "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    forked(lambda: Project(parent).pin(train={"max_steps": 6, "eval_steps": 3}, preflight={"level": "quick"}))
    for name in ("validate_data", "preflight", "recommend_config", "train", "evaluate"):
        forked(command, (f"stages.{name}",), folder)
    shutil.copytree(folder / OUTPUT / "adapters", folder / FIRST)
    for unused in ("safetrain", "stages", OUTPUT / "last_result"):
        shutil.rmtree(folder / unused, ignore_errors=True)
    return folder


def main() -> None:
    """The table and the failures; ends with 1 when there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=FULL)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="KIND[:NUMBER]", default="")
    asked = parser.parse_args()
    kind, _, number = asked.only.partition(":")
    shares = {name: (share, max(1, round(share * asked.cases / FULL))) for name, (share, *_) in KINDS.items()}
    chosen = [Case(name, (2 * n + 1) * max(share, many) // (2 * many), asked.seed)  # spread over what a kind has
              for name, (share, many) in shares.items() for n in range(many) if kind in ("", name)]  # fmt: skip
    chosen = [Case(kind, int(number), asked.seed)] if number else chosen
    Random(1).shuffle(chosen)  # slow ones side by side with quick ones
    found = list[Outcome]()
    for name in PRELOADED:
        importlib.import_module(name)
    with scratch_folder() as scratch, ProcessPoolExecutor(AT_ONCE, FORK) as pool:
        good = good_project(scratch / "good")
        waiting = [pool.submit(run, good, each) for each in chosen]
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            for done in as_completed(waiting):
                found.append(one := done.result())
                if one.cause or number:
                    print(len(found), *one.case[:2], one.cause, one.said if number else repr(one.last_line), flush=True)
        except KeyboardInterrupt:  # then it tells what it has
            pool.shutdown(wait=False, cancel_futures=True)
    write_tables(found, asked.seed, write_result if len(found) >= FULL else show_result)
    sys.exit(any(each.verdict != HELD for each in found))


def write_tables(found: list[Outcome], seed: int, write: Callable[..., object]) -> None:
    """By kind; below, the failures by cause, each with the command that repeats one."""
    count = Counter((kind, each.verdict) for each in found for kind in (each.case.kind, "all"))
    counts = {kind: [count[kind, each] for each in VERDICTS] for kind in (*KINDS, "all")}
    rows = [[kind, sum(many), *many] for kind, many in counts.items() if any(many)]
    failed = [each for each in sorted(found) if each.cause]
    lines = []
    for cause, many in Counter(each.cause for each in failed).most_common():
        those = [each for each in failed if each.cause == cause]
        numbers = ", ".join(f"{each.case.kind}:{each.case.number}" for each in those[:12])
        lines.append(f"- {cause}: {many} ({numbers}), e.g. {those[0].what}: {those[0].last_line!r}")
    slow, large = (max(found, key=lambda each: (each.verdict == HELD, each[place])) for place in (-2, -1))
    most = f"{slow.seconds:.0f} s ({slow.case.kind}:{slow.case.number}), {large.peak_bytes / 1e9:.1f} GB"
    again = f"python -m benchmarks.bench_hostile --seed {seed} --only KIND:NUMBER"
    notes = [f"Seed {seed}; to repeat one: `{again}`. Within the bars, at most: {most}.", "\n".join(lines)]
    write("bench_hostile", "Hostile inputs, and what becomes of them", ["kind", "cases", *VERDICTS], rows, notes)


if __name__ == "__main__":
    main()

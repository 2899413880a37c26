"""First contact with a GPU: what safetrain claims of one, in parts, each a process of its own with a time limit.

    python -m benchmarks.first_contact OUT [PART …] [--size=gpu|small|tiny] [--seconds=LIMIT]

A part's result is in OUT/first_contact.json, and on the page beside it, as soon as there is one: a machine that goes
away takes one part with it. The same command goes on with the parts that are missing; PART makes parts again; another
size begins anew. Without --size it is gpu on a GPU (about ten minutes, at most fifteen), else small: a rehearsal on the
CPU with a GPU's code (five). tiny is for tests.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.throughput_cases import ROOT
from safetrain.core.signals import handling, terminate
from safetrain.core.storage.files import write_text

LIMITS = {  # of each part, in seconds; the most valuable first
    "machine": 30, "probe": 90, "selftest": 90, "gradients": 60, "train": 150, "attention": 60, "losses": 90,
    "kill": 180, "disk": 60, "peer": 90,
}  # fmt: skip
NAMES = {
    "machine": "The machine", "probe": "What preflight measures", "selftest": "safetrain selftest --report",
    "gradients": "Loss and gradient beside the CPU's in float32", "train": "LoRA by the stages",
    "attention": "Attention, forward and backward: mlx's kernel beside the tiles",
    "losses": "Updates beside the CPU's", "kill": "kill -9 and the same command again",
    "disk": "The base on disk, under a limit", "peer": "mlx_lm.lora on the same rows",
}  # fmt: skip
# On Ampere and newer, products in float32 round their factors to TF32 unless this is said: 1e-3 of a gradient.
EXACTLY = {name: {"MLX_ENABLE_TF32": "0"} for name in ("gradients", "losses", "disk")}
RESULT, PAGE = "first_contact.json", "first_contact.md"
TAIL = 600  # characters of what a part said before it failed
Found = dict[str, Any]


def main(words: list[str]) -> int:
    """Make the parts that are asked for, or those that are missing; 1 if one of them failed."""
    asked, parser = arguments(words)
    out, found = asked.out.resolve(), Found(parts={})
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (out / RESULT).is_file():
            found = json.loads((out / RESULT).read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{out} cannot be used: {error}")
    with handling({signal.SIGTERM: terminate}):
        if "backend" not in found["parts"].get("probe", {}):
            make(out, found, "probe", "", asked.seconds)
        backend = found["parts"]["probe"].get("backend")
        if backend is None:
            return 1
        size = asked.size or found.get("size") or ("small" if backend == "cpu" else "gpu")
        if found.get("size", size) != size:
            found["parts"] = {"probe": found["parts"]["probe"]}
        found |= {"size": size, "backend": backend}
        names = asked.part or [name for name in LIMITS if "failed" in found["parts"].get(name, {"failed": ""})]
        results = [make(out, found, name, size, asked.seconds) for name in names]
    return int(any("failed" in result for result in results))


def arguments(words: list[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """What the command line says; ends with a message if it says something else."""
    parser = argparse.ArgumentParser(
        "first_contact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("part", nargs="*", help=", ".join(LIMITS))
    parser.add_argument("--size", choices=["gpu", "small", "tiny"])
    parser.add_argument("--seconds", type=float, help="another limit for every part")
    asked = parser.parse_args(words)
    if unknown := {*asked.part} - LIMITS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(LIMITS)}")
    return asked, parser


def make(out: Path, found: Found, name: str, size: str, limit: float | None) -> Found:
    """Make a part, add it to ``found``, write both files, print it."""
    print(f"{NAMES[name]} ...", flush=True)
    began = time.monotonic()
    result = found["parts"][name] = part(name, out, size, limit or LIMITS[name])
    result["seconds"] = round(time.monotonic() - began, 1)
    write_text(out / RESULT, json.dumps(found, indent=1))
    write_text(out / PAGE, "\n".join(page(found)) + "\n")
    print("\n".join(section(name, result)), flush=True)
    return result


def part(name: str, out: Path, size: str, limit: float) -> Found:
    """Make one part in a process of its own: what it found, or how it failed."""
    command = [sys.executable, "-m", "benchmarks.first_contact_parts", name, str(out), size]
    environment = {**os.environ, **EXACTLY.get(name, {})}
    with (out / f"{name}.log").open("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment)
        try:
            said, _ = child.communicate(timeout=limit)
            ended = "" if child.returncode == 0 else f"exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            said, ended = "", f"not finished after {limit:g} s"
        finally:
            end(child.pid)
            child.wait()
        log.seek(0)
        try:
            return json.loads(said.splitlines()[-1])
        except (IndexError, ValueError):
            return {"failed": f"{ended or 'no answer'}: {' '.join(log.read()[-TAIL:].split())}"}


def end(process: int) -> None:
    """Kill a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        whole = psutil.Process(process)
        for each in [*whole.children(recursive=True), whole]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def page(found: Found) -> Iterator[str]:
    """The whole page, in Markdown."""
    yield "# First contact"
    yield from ("", "Made by `python -m benchmarks.first_contact`; each part is a process of its own.")
    if found.get("backend", "cpu") == "cpu":
        yield from ("", "**A rehearsal on a CPU**, with small models and a GPU's code: no figure here is a GPU's.")
    for name in LIMITS:
        if name in found["parts"]:
            yield from ("", *section(name, found["parts"][name]))


def section(name: str, result: Found) -> Iterator[str]:
    """A part's heading and figures: a list of equal records is a table, a text of several lines a block."""
    yield f"## {NAMES[name]} ({result['seconds']} s)"
    plain = {key: value for key, value in result.items() if key != "seconds" and not isinstance(value, list)}
    yield ""
    for key, value in plain.items():
        yield from ("```", value.strip(), "```") if "\n" in str(value) else (f"- {key}: {shown(value)}".rstrip(),)
    for rows in (value for value in result.values() if isinstance(value, list) and value):
        yield from ("", f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}")
        yield from (f"| {' | '.join(map(shown, row.values()))} |" for row in rows)


def shown(value: Any) -> str:
    """A value in a few figures."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")

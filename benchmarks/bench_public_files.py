"""What an earlier version and this one find in public data files, side by side.

`python -m benchmarks.bench_public_files BEFORE FILE…`: BEFORE is a checkout of the earlier version; PYTHONPATH may
name packages that it needs. Nothing is downloaded; the files' names say where they are from.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import write_result

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "encyclopedia-3m"
OF_MODEL = ("BEYOND-CONTEXT", "OPENING-DIFFERS")  # say more of the small model than of the file


@dataclass(frozen=True)
class Found:
    """What one version found in a file: rows by severity and id."""

    seconds: float
    findings: dict[str, int]


def main(before: Path, files: list[Path], notes: list[str]) -> None:
    """Validate every file with both versions and write the table."""
    table = list[list[object]]()
    for path in files:
        earlier, now = validated(before, path), validated(ROOT, path)
        table.append([path.name, *difference(earlier, now), f"{earlier.seconds:.1f} s", f"{now.seconds:.1f} s"])
        print(*table[-1], sep=" | ", flush=True)
    header = ["file", "in both", "before alone", "now alone", "before", "now"]
    write_result("bench_public_files", "Findings in public files, before and after", header, table, notes)


def validated(tree: Path, path: Path) -> Found:
    """What the version in ``tree`` finds in a file."""
    own = os.environ.get("PYTHONPATH", "")
    command = [sys.executable, "-m", "safetrain.cli", "validate", str(path), "--model", str(MODEL), "--json"]
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{own}"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if not done.stdout.startswith("{"):
        raise SystemExit(done.stderr)
    counts: dict[str, int] = {}
    for finding in json.loads(done.stdout)["findings"]:
        if finding["id"] not in OF_MODEL:
            name = f"{finding['severity']} {finding['id']}"
            counts[name] = counts.get(name, 0) + finding["count"]
    return Found(seconds, counts)


def difference(earlier: Found, now: Found) -> tuple[str, str, str]:
    """What both found, and what only one of them did; where the counts differ, the two."""
    both, before, after = list[str](), list[str](), list[str]()
    for name in sorted({*earlier.findings, *now.findings}):
        counts = earlier.findings.get(name), now.findings.get(name)
        if counts[1] is None:
            before.append(f"{name} {counts[0]:,}")
        elif counts[0] is None:
            after.append(f"{name} {counts[1]:,}")
        else:
            both.append(f"{name} {counts[0]:,}" + (f" → {counts[1]:,}" if counts[0] != counts[1] else ""))
    return ", ".join(both), ", ".join(before), ", ".join(after)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--note", action="append", default=[], help="what to write below the table")
    given = parser.parse_args()
    main(given.before.resolve(), [path.resolve() for path in given.files], given.note)

"""What the data gate warns of in material that others wrote, and how much of it somebody who read it calls true.

`python -m benchmarks.bench_false_alarms [--judged FILE.csv] [--note TEXT] KIND=PATH …`: PATH is a file of rows, or a
folder of them; KIND is what the table groups them by. Nothing is downloaded. FILE.csv has the columns
source,finding,true: how many warnings of each id are right in the source, which is the name of its file without the
ending.
"""

import argparse
import collections
import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import write_result
from safetrain.core.records.reports import Finding
from safetrain.data.findings import SHOWN_PLACES, WARNING
from safetrain.data.folders import SUFFIXES
from safetrain.data.validate import validate

MODEL = Path(__file__).resolve().parent.parent / "models" / "encyclopedia-3m"
Judged = Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class Source:
    """One file of material."""

    kind: str
    name: str
    rows: int
    warnings: Mapping[str, int]  # rows by the id of the finding


def main() -> None:
    """Read all material and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("material", nargs="+", metavar="KIND=PATH")
    parser.add_argument("--judged", type=Path)
    parser.add_argument("--note", action="append", default=[], help="what to write below the table")
    given = parser.parse_args()
    judged = read_judged(given.judged) if given.judged else {}
    sources = []
    for each in given.material:
        kind, _, path = each.partition("=")
        sources += [look_at(kind, file) for file in files_in(Path(path))]
    table = []
    for kind in dict.fromkeys(source.kind for source in sources):
        some = [source for source in sources if source.kind == kind]
        table += [line(source, judged) for source in some] + [total(kind, some, judged)]
    header = ["kind", "source", "rows", "warnings", "judged true", "false per 1,000 rows", "of which, by finding"]
    write_result("bench_false_alarms", "Warnings of the data gate in text of others", header, table, given.note)


def files_in(path: Path) -> list[Path]:
    """The files of rows at ``path``, a file or a folder."""
    return [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)


def read_judged(path: Path) -> Judged:
    """How many warnings are right, by source and finding."""
    with path.open(encoding="utf-8", newline="") as file:
        return {(row["source"], row["finding"]): int(row["true"]) for row in csv.DictReader(file)}


def look_at(kind: str, path: Path) -> Source:
    """Validate one file as train; print what it warns of."""
    rows, findings = findings_of(path)
    warnings = collections.Counter[str]()
    for finding in findings:
        if finding.severity == WARNING:
            warnings[finding.id] += finding.count
            print(f"{finding.id}: {finding.message}\n  {'; '.join(finding.where)}")
    return Source(kind, path.stem, rows, warnings)


def findings_of(path: Path, places: int = SHOWN_PLACES) -> tuple[int, tuple[Finding, ...]]:
    """How many rows a file has and all that is found in it, each with ``places`` at most, by `safetrain validate`.

    How much context a model has is no fault of the data.
    """
    found = validate([path], MODEL, most_places=places)
    return found.count, tuple(finding for finding in found.findings if finding.id != "BEYOND-CONTEXT")


def true_of(source: Source, judged: Judged) -> int:
    """How many of its warnings are right; a judgement of earlier rules may count more than there still are."""
    return sum(min(count, judged.get((source.name, name), 0)) for name, count in source.warnings.items())


def line(source: Source, judged: Judged) -> list[object]:
    """A source's line of the table."""
    warnings, true = sum(source.warnings.values()), true_of(source, judged)
    parts = [
        f"{name} {count} ({judged.get((source.name, name), 0)} true)" for name, count in sorted(source.warnings.items())
    ]
    rate = f"{1000 * (warnings - true) / max(source.rows, 1):.2f}"
    return [source.kind, source.name, f"{source.rows:,}", warnings, true, rate, ", ".join(parts)]


def total(kind: str, sources: list[Source], judged: Judged) -> list[object]:
    """The line of all sources of a kind."""
    rows, true = sum(source.rows for source in sources), sum(true_of(source, judged) for source in sources)
    warnings = sum(sum(source.warnings.values()) for source in sources)
    return [kind, "**all**", f"{rows:,}", warnings, true, f"**{1000 * (warnings - true) / max(rows, 1):.2f}**", ""]


if __name__ == "__main__":
    main()

"""The metrics of a long run, thinned while they are read: a million lines take seconds and about 300 MiB."""

from collections.abc import Sequence
from dataclasses import dataclass

from safetrain.core.records.metrics import COLUMNS, StepRecord, parse_csv

MOST_RECORDS, BLOCKS = 20_000, 800  # more lines than that are thinned, to so many blocks of them
EXTREMES = ("train_loss", "valid_loss", "grad_norm", "labels_per_second", "peak_memory_bytes", "footprint_bytes")
MEANS = ("train_loss", "labels_per_second")


@dataclass(frozen=True)
class MetricsRead:
    """Records to draw. ``means``: of a long run, one record a block with the means of its lines; else none."""

    steps: tuple[StepRecord, ...]
    means: tuple[StepRecord, ...]


def read_metrics(text: str) -> MetricsRead:
    """All records, or of each block of a long run the first, the last and the extremes; raises ValueError."""
    head, *lines = text[: text.rfind("\n") + 1].split("\n")[:-1] or [""]
    if len(lines) <= MOST_RECORDS or head != ",".join(COLUMNS):
        return MetricsRead(tuple(parse_csv(text)), ())
    size = -(-len(lines) // BLOCKS)
    kept, means = [head], [head]
    for start in range(0, len(lines), size):
        block = [line.split(",") for line in lines[start : start + size]]
        kept += [lines[start + place] for place in _places(block)]
        means.append(",".join(_mean(block)))
    return MetricsRead(tuple(parse_csv(_text(kept))), tuple(parse_csv(_text(means))))


def _places(block: Sequence[list[str]]) -> list[int]:
    found = {0, len(block) - 1}
    for name in EXTREMES:
        column = COLUMNS.index(name)
        values = [(float(fields[column]), place) for place, fields in enumerate(block) if fields[column]]
        found |= {min(values)[1], max(values)[1]} if values else set()
    return sorted(found)


def _mean(block: Sequence[list[str]]) -> list[str]:
    """The middle line, with the means of some columns in it."""
    fields = list(block[len(block) // 2])
    for name in MEANS:
        column = COLUMNS.index(name)
        values = [float(other[column]) for other in block if other[column]]
        fields[column] = repr(sum(values) / len(values)) if values else ""
    return fields


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"

"""Checks a data set row by row and splits it. Every bad row is named; nothing is dropped. No mlx."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.chat import Rendered, render
from safetrain.core.data.jsonl import SourcedRow, bad_rows, read_rows
from safetrain.core.data.rows import Row, RowError
from safetrain.core.data.tokenizer import ChatTokenizer, TemplateError
from safetrain.core.errors import DataError
from safetrain.core.reports import DataReport, LengthQuantiles, SplitReport
from safetrain.core.words import counted

SPLITS = ("train", "valid", "test")
MIN_ROWS = 3


@dataclass(frozen=True)
class Splits:
    """The three sets of rows, and in words how they came to be."""

    train: tuple[SourcedRow, ...]
    valid: tuple[SourcedRow, ...]
    test: tuple[SourcedRow, ...]
    how: str

    def named(self) -> list[tuple[str, tuple[SourcedRow, ...]]]:
        """The sets with their names."""
        return [("train", self.train), ("valid", self.valid), ("test", self.test)]


def load_splits(source: Path, valid_fraction: float, test_fraction: float) -> Splits:
    """Read ``source``, a file or a folder, and split off from train what has no file of its own; raises DataError."""
    if source.is_file():
        files = {"train": source}
    elif source.is_dir():
        files = {name: source / f"{name}.jsonl" for name in SPLITS if (source / f"{name}.jsonl").is_file()}
        if "train" not in files:
            raise DataError("The data folder has no train.jsonl.", where=str(source), do="put your rows there")
    else:
        raise DataError(
            "The data does not exist.",
            where=str(source),
            expected="a .jsonl file, or a folder with train.jsonl",
            do="correct data.path in params.yaml",
        )
    rows = {name: read_rows(path) for name, path in files.items()}
    fractions = {"valid": valid_fraction, "test": test_fraction}
    missing = {name: share for name, share in fractions.items() if name not in rows}
    if not missing:
        return Splits(tuple(rows["train"]), tuple(rows["valid"]), tuple(rows["test"]), "train, valid and test as given")
    rows.update(_split_off(rows["train"], missing, files["train"]))
    parts = " and ".join(f"{name} ({counted(len(rows[name]), 'row')})" for name in missing)
    how = f"{parts} split off train by content"
    return Splits(tuple(rows["train"]), tuple(rows["valid"]), tuple(rows["test"]), how)


def _split_off(rows: list[SourcedRow], shares: dict[str, float], path: Path) -> dict[str, list[SourcedRow]]:
    """Deal rows out by a hash of their question: the same on every machine, and equal questions stay together."""
    groups: dict[str, list[SourcedRow]] = {}
    for sourced in rows:
        digest = hashlib.blake2b(sourced.row.question().encode(), digest_size=16).hexdigest()
        groups.setdefault(digest, []).append(sourced)
    if len(groups) < MIN_ROWS:
        raise DataError(
            "Too few different rows to split.",
            where=str(path),
            expected=f"at least {MIN_ROWS} rows with different questions",
            got=str(len(groups)),
        )
    order = sorted(groups)
    taken: dict[str, list[SourcedRow]] = {}
    for name, share in shares.items():
        count = max(1, min(round(share * len(groups)), len(order) - 1 - (len(shares) - len(taken) - 1)))
        chosen, order = set(order[:count]), order[count:]
        taken[name] = [row for digest in groups if digest in chosen for row in groups[digest]]
    used = {id(row) for part in taken.values() for row in part}
    return {**taken, "train": [row for row in rows if id(row) not in used]}


def check_dataset(
    splits: Splits, tokenizer: ChatTokenizer, source: Path, max_positions: int | None = None
) -> DataReport:
    """Render every row as training will; raises DataError naming each row that gives nothing to train.

    One whose first answer begins beyond the model's context (``max_positions`` tokens) is such a row.
    """
    faults: list[str] = []
    reports, untrained_turns = {}, 0
    for name, rows in splits.named():
        rendered = [_render(sourced, tokenizer, max_positions, faults) for sourced in rows]
        good = [item for item in rendered if item is not None]
        untrained_turns += sum(item.untrained_turns for item in good)
        if not faults:
            reports[name] = _split_report(good)
    if faults:
        raise bad_rows(faults)
    formats = sorted({sourced.row.format for _, rows in splits.named() for sourced in rows})
    warnings = [*_overlaps(splits), *_duplicates(splits)]
    if any(_tools_are_ignored(sourced.row, tokenizer) for _, rows in splits.named() for sourced in rows[:100]):
        warnings.append("the model's chat template ignores tools: they are not in what is trained")
    if untrained_turns:
        turns = counted(untrained_turns, "earlier assistant turn")
        warnings.append(f"{turns} not trained: the chat template renders such turns differently once the chat goes on")
    return DataReport(str(source), "+".join(formats), splits.how, **reports, warnings=tuple(warnings))


def _tools_are_ignored(row: Row, tokenizer: ChatTokenizer) -> bool:
    if not row.tools:
        return False
    try:
        return tokenizer.chat(row.messages, row.tools) == tokenizer.chat(row.messages)
    except TemplateError:  # it needs them, then
        return False


def _render(
    sourced: SourcedRow, tokenizer: ChatTokenizer, max_positions: int | None, faults: list[str]
) -> Rendered | None:
    try:
        rendered = render(sourced.row, tokenizer)
    except RowError as error:
        faults.append(f"{sourced.where}: {error}")
        return None
    first = rendered.trained.index(True)
    if max_positions is not None and first >= max_positions:
        faults.append(
            f"{sourced.where}: its answer begins at token {first + 1}, beyond the model's context of {max_positions}"
        )
        return None
    return rendered


def _split_report(rendered: list[Rendered]) -> SplitReport:
    lengths = sorted(len(item.ids) for item in rendered)
    return SplitReport(
        rows=len(rendered),
        tokens=sum(lengths),
        trained_tokens=sum(item.trained_tokens for item in rendered),
        lengths=LengthQuantiles(
            p50=_quantile(lengths, 0.5),
            p90=_quantile(lengths, 0.9),
            p95=_quantile(lengths, 0.95),
            p99=_quantile(lengths, 0.99),
            p99_5=_quantile(lengths, 0.995),
            max=lengths[-1],
        ),
    )


def _quantile(ordered: list[int], share: float) -> int:
    """The smallest length that at least ``share`` of the rows do not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _overlaps(splits: Splits) -> list[str]:
    """Rows that stand in two files: they make validation or test look better than it is."""
    seen = {name: {sourced.row.identity() for sourced in rows} for name, rows in splits.named()}
    found = []
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        shared = len(seen[first] & seen[second])
        if shared:
            found.append(f"{first} and {second} share {counted(shared, 'row')}")
    return found


def _duplicates(splits: Splits) -> list[str]:
    first: dict[str, str] = {}
    repeated: list[tuple[str, str]] = []
    for sourced in splits.train:
        earlier = first.setdefault(sourced.row.identity(), sourced.where)
        if earlier != sourced.where:
            repeated.append((sourced.where, earlier))
    if not repeated:
        return []
    return [f"{counted(len(repeated), 'repeated training row')}, the first: {repeated[0][0]} repeats {repeated[0][1]}"]


def rows_of(rows: tuple[SourcedRow, ...]) -> list[Row]:
    """The rows without their sources."""
    return [sourced.row for sourced in rows]

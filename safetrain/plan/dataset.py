"""Validates a data set: every row read, split, rendered and tokenized once, and written as the later stages map it.

Two passes over the files, neither of which holds the rows: the first parses every line and remembers a hash of each,
which decides the split; the second renders and tokenizes.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import IO

import numpy as np

from safetrain.core.data.jsonl import bad_rows, located, parse_line
from safetrain.core.data.rendering import Labelling
from safetrain.core.data.rows import RowError
from safetrain.core.data.store import Made, StoreWriter, read_made, store_path
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.data.tokenizer_files import tokenizer_hash
from safetrain.core.errors import DataError
from safetrain.core.files import replace_directory
from safetrain.core.reports import DataReport, Finding, LengthQuantiles, SplitReport
from safetrain.plan.findings import ERROR, WARNING, Findings, Severities
from safetrain.plan.sources import SPLITS, blocks_of, files_of, unread_files
from safetrain.plan.splits import RowHashes, split_off
from safetrain.plan.tokenizing import Limits, ReadRow, RowReader, canonical

MOST_FAULTS = 10_000  # bad lines that are remembered
SAY_EVERY_ROWS = 20_000


@dataclass(frozen=True)
class Source:
    """What to validate and how to split it."""

    path: Path
    valid_fraction: float
    test_fraction: float


@dataclass(frozen=True)
class Scan:
    """The first pass: a hash of every row, by the split that its file is for."""

    hashes: dict[str, RowHashes]
    formats: tuple[str, ...]
    digest: str  # of the files


def validate(
    source: Source,
    model: Path,
    limits: Limits,
    labelling: Labelling,
    severities: Severities,
    into: Path,
    say: Callable[[str], None],
) -> DataReport:
    """Write ``into`` the canonical rows and a token store of each split, all or nothing; raises DataError, ModelError.

    Templates are told the date of the validation before, where nothing else has changed since.
    """
    files = files_of(source.path)
    scan = _scan(files)
    parts, how = split_off(scan.hashes, source.valid_fraction, source.test_fraction, files["train"])
    tokenizer_digest, settings = tokenizer_hash(model), json.dumps(dataclasses.asdict(labelling), sort_keys=True)
    before = read_made(store_path(into, "train"))
    same = before and (before.tokenizer, before.settings, before.source) == (tokenizer_digest, settings, scan.digest)
    day = date.fromisoformat(before.made_on) if before and same else today()
    findings = Findings(severities)
    for name in unread_files(source.path, files):
        findings.add("FILES-UNREAD", name)
    _tell_repetitions(findings, scan.hashes, parts, files)
    tokenizer = ChatTokenizer(model, day)
    reader = RowReader(tokenizer, labelling, limits, findings)
    with _staged(into) as folder, contextlib.ExitStack() as stack:
        splits = {name: stack.enter_context(_Split(folder, name)) for name in SPLITS}
        _read(reader, files, parts, splits, sum(len(part) for part in parts.values()), say)
        if findings.has_errors():
            raise refused(findings.listed())
        asked, opening = reader.openings.most_common(1)[0][0] if reader.openings else ("", "")
        made = Made(tokenizer_digest, settings, scan.digest, day.isoformat(), reader.stop_ids(), opening, asked)
        for split in splits.values():
            split.finish(made, [str(path) for path in files.values()])
        replace_directory(folder, into)
    listed = findings.listed()
    return DataReport(
        source=str(source.path),
        format="+".join(scan.formats),
        split=how,
        train=splits["train"].report(),
        valid=splits["valid"].report(),
        test=splits["test"].report(),
        warnings=tuple(finding.message for finding in listed if finding.severity == WARNING),
        findings=listed,
        template_date=day.isoformat(),
        stop_tokens=tuple(tokenizer.token_of(number) for number in reader.stop_ids()),
        opening=_opening_text(asked, opening, labelling),
    )


def today() -> date:
    """By the clock."""
    return date.today()


def refused(findings: tuple[Finding, ...]) -> DataError:
    """One error for everything that ends a validation."""
    lines = []
    for finding in findings:
        if finding.severity == ERROR:
            places = ", ".join(finding.where[:3]) + (", …" if finding.count > 3 else "")
            lines.append(f"  {places}: {finding.message} [{finding.id}]\n    do: {finding.remedy}")
    return DataError("The data cannot be trained as it is:\n" + "\n".join(lines), do="see above; nothing was written")


def _opening_text(asked: str, opening: str, labelling: Labelling) -> str:
    if asked:
        return f"as is trained, without the {asked!r} of the template's generation prompt (data.opening=trained)"
    if opening:
        return f"behind {opening!r}, which is context and not trained (data.train_empty_thinking=false)"
    extra = " (data.opening=prompt)" if labelling.opening == "prompt" else ""
    return f"as the chat template asks, which is what is trained{extra}"


def _scan(files: dict[str, Path]) -> Scan:
    """Parse every line; raises one DataError that lists the bad ones."""
    hashes, faults, formats, digest = {}, list[str](), set[str](), hashlib.blake2b(digest_size=16)
    for name, path in files.items():
        found = RowHashes()
        for lines in blocks_of(path):
            digest.update("\n".join(lines.texts).encode())
            for number, text in lines.numbered():
                try:
                    row = parse_line(text)
                except RowError as error:
                    if len(faults) < MOST_FAULTS:
                        faults.append(located(f"{path}:{number}", error))
                    continue
                formats.add(row.format)
                found.add(row, number)
        hashes[name] = found
        if not len(found) and not faults:
            raise DataError("The data file has no rows.", where=str(path), do="put one JSON object on each line")
    if faults:
        raise bad_rows(faults)
    return Scan(hashes, tuple(sorted(formats)), digest.hexdigest())


def _tell_repetitions(
    findings: Findings, hashes: dict[str, RowHashes], parts: dict[str, np.ndarray], files: dict[str, Path]
) -> None:
    """Rows that stand in two splits, or twice in train."""
    identities = {
        name: np.concatenate([found.identities()[parts[file] == code] for file, found in hashes.items()])
        for code, name in enumerate(SPLITS)
    }
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        shared = len(np.intersect1d(identities[first], identities[second]))
        if shared:
            findings.add("SPLITS-OVERLAP", f"{first} and {second}", shared)
    train = identities["train"]
    _, firsts, counts = np.unique(train, return_index=True, return_counts=True)
    repeated = int((counts - 1).sum())
    if repeated:
        seen = np.zeros(len(train), dtype=np.bool_)
        seen[firsts] = True
        lines = hashes["train"].lines()[parts["train"] == 0]
        findings.add("REPEATED-ROWS", "", repeated, [f"{files['train']}:{line}" for line in lines[~seen][:5]])


def _read(
    reader: RowReader,
    files: dict[str, Path],
    parts: dict[str, np.ndarray],
    splits: "dict[str, _Split]",
    total: int,
    say: Callable[[str], None],
) -> None:
    done = 0
    for number, (name, path) in enumerate(files.items()):
        for place, read in enumerate(reader.rows(path, str(path))):
            split = SPLITS[parts[name][place]]
            splits[split].add(read, number, reader.prompt(read) if split == "test" else None)
            done += 1
            if done % SAY_EVERY_ROWS == 0:
                say(f"{done:,} of {total:,} rows are tokenized")


class _Split:
    """One split while it is written."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._stack = contextlib.ExitStack()
        self._lengths, self._labels = array("I"), 0

    def __enter__(self) -> "_Split":
        path = self._folder / f"{self._name}.jsonl"
        self._rows: IO[str] = self._stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
        self._store = self._stack.enter_context(StoreWriter(store_path(self._folder, self._name)))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(self, read: ReadRow, file: int, prompt: list[int] | None) -> None:
        """A row, if it can be trained; what cannot has been counted as an error. ``prompt``: ids that ask for it."""
        if read.tokens is None or read.row is None or read.rendered is None:
            return
        self._rows.write(canonical(read.row))
        self._store.add(read.tokens.ids, read.tokens.trained, file, read.line)
        self._lengths.append(len(read.tokens))
        self._labels += read.tokens.trained_tokens
        if prompt is not None:
            self._store.add_question(prompt, read.last_answer(), read.rendered.question or "")

    def finish(self, made: Made, files: list[str]) -> None:
        """Write the store."""
        self._rows.flush()
        self._store.finish(made, files)

    def report(self) -> SplitReport:
        """Its figures."""
        lengths = np.sort(np.array(self._lengths))
        shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_5": 0.995}
        quantiles = {key: _quantile(lengths, share) for key, share in shares.items()}
        figures = LengthQuantiles(**quantiles, max=int(lengths[-1]))
        return SplitReport(len(lengths), int(lengths.sum()), self._labels, figures)


def _quantile(ordered: np.ndarray, share: float) -> int:
    """The smallest length that at least ``share`` of the rows do not exceed."""
    return int(ordered[max(0, -int(-share * len(ordered) // 1) - 1)])


@contextlib.contextmanager
def _staged(into: Path) -> Iterator[Path]:
    """A folder beside ``into`` that is gone afterwards, unless it has taken its place."""
    into.parent.mkdir(parents=True, exist_ok=True)
    for left in into.parent.glob(f".{into.name}-new-*"):  # of a validation that was killed
        shutil.rmtree(left, ignore_errors=True)
    folder = into.parent / f".{into.name}-new-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

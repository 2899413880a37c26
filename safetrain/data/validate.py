"""Entry points of safetrain.data: validate data and write splits, read a test file, and read texts for a tokenizer.

A row goes from its file (files) to a Row (forms), to text with labels (render), to tokens (tokenize), and to a split
and its token store (split). It is read once, and waits in a scratch file until all rows are known and a hash of its
question decides its split.
"""

import contextlib
import dataclasses
import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from safetrain.core.data.store import Provenance, read_made, store_path
from safetrain.core.formatting import counted
from safetrain.core.model.files import tokenizer_hash
from safetrain.core.records.reports import DataReport, Finding, SplitReport
from safetrain.core.storage.files import full_disk_named, replace_directory, sha256_of
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.data.compare import RowFacts, compare
from safetrain.data.files import rows_of
from safetrain.data.findings import SHOWN_PLACES, WARNING, Findings, Spot
from safetrain.data.folders import PLAIN, SPLITS, DataFiles, data_files_of, named_files, suffix_of
from safetrain.data.forms import Columns, parse_row
from safetrain.data.rows import RowError
from safetrain.data.split import MIN_GROUPS, TRAIN, add_rows, split_off, stored_rows, write_splits
from safetrain.data.tokenize import DataSettings, ReadRow, RowReader

USUAL_SETTINGS = DataSettings()
FEW_ROWS = 5  # that a small split may have more or less by chance
PIECE = re.compile(r"(?s:.{1,65536})[^\n]*\n?")  # of text, up to the end of a line, so that a sample can be spread


@dataclass(frozen=True)
class Validation:
    """The findings in some data, and data_report.json if its splits were written."""

    found: Mapping[Finding, Sequence[Spot]]  # with their places
    count: int  # rows, including those that cannot be trained on
    tokens: int
    labels: int
    label_bytes: int  # UTF-8 bytes of all answers
    written: DataReport | None
    rows: Sequence[ReadRow] = ()  # rows to show
    context: int | None = None  # the model's context in tokens, if its config.json has it
    noun: str = "row"  # or document, for pretraining, or pair

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings without their places."""
        return tuple(self.found)

    @property
    def report(self) -> DataReport:
        """The content of data_report.json, if the splits were written."""
        assert self.written is not None, "the splits were not written"
        return self.written


def validate(
    paths: Sequence[Path],
    model: Path,
    settings: DataSettings = USUAL_SETTINGS,
    into: Path | None = None,
    *,
    shown_rows: int = 0,
    most_places: int = SHOWN_PLACES,
) -> Validation:
    """Validate all data in ``paths``, files or folders, for ``model``; raises DataError for missing files, ModelError.

    With ``into``, there is one path, a data set. Canonical rows and a token store of each split are written into the
    folder ``into``, all or nothing, and errors in the data raise DataError. Without it, errors are findings, file names
    give the splits, and the first ``shown_rows`` (-1: all) are returned. A finding lists its first ``most_places``.
    """
    findings = Findings(settings.downgrade, most_places, may_refuse=into is not None)
    if into is not None:
        files = data_files_of(paths[0], documents=settings.documents)
    else:
        files = named_files(paths, documents=settings.documents)
        is_plain = any(suffix_of(path) in PLAIN for path in files.paths)
        settings = dataclasses.replace(settings, documents=settings.documents or is_plain)
    provenance = _provenance(model, into, _digest(files.paths) if into is not None else "")
    tokenizer = ChatTokenizer(model, date.fromisoformat(provenance.made_on))
    reader, sample, report = RowReader(files, tokenizer, settings, findings), list[ReadRow](), None
    facts = RowFacts(files.paths, findings)
    with written(into) as folder, tempfile.TemporaryFile(dir=folder) as spool:
        for number, block in reader.blocks():
            facts.add(block, number)
            most = len(block) if shown_rows < 0 else shown_rows * (1 + reader.has_pairs) - len(sample)
            sample += block[:most]
            if into is not None:
                add_rows(spool, stored_rows(block, number))
        findings.refuse_errors()
        noun = "pair" if reader.has_pairs else "row"
        parts, how = _compared(files, facts, settings, noun, is_split=into is not None)
        findings.refuse_errors()
        if into is not None:
            made, form = reader.provenance(provenance), "+".join(sorted(reader.formats))
            parts = np.repeat(parts, 1 + reader.has_pairs)
            splits = write_splits(spool, folder, parts, files.paths, made, tokenizer)
            report = _report(findings, paths[0], splits, made, tokenizer, form, how)
    counts = (reader.rows, reader.tokens, reader.labels, reader.label_bytes)
    return Validation(
        findings.found(), *counts, report, sample, reader.context, "document" if settings.documents else noun
    )


def _compared(
    files: DataFiles, facts: RowFacts, settings: DataSettings, noun: str, *, is_split: bool
) -> tuple[np.ndarray, str]:
    """Compare all rows, if there are any; returns the split of each, (rows,), and how it was chosen."""
    parts = np.array([SPLITS.index(name) for name in files.names], dtype=np.uint8)[facts.column("files")]
    if not len(facts):
        return parts, ""
    facts.find_duplicates(settings.similarity)
    how = ""
    if is_split:
        clusters, note = facts.clusters, ""
        if set(files.names) != set(SPLITS) and len(np.unique(clusters[parts == TRAIN])) < MIN_GROUPS:
            note = "; all rows are near-duplicates of each other, so they end up in several splits"
            clusters = facts.groups  # identical questions still stay together
        digests, path, rows = facts.column("questions"), files.paths[0], np.count_nonzero(parts == TRAIN)
        parts, how = split_off(files.names, parts, clusters, digests, settings.shares, path, noun)
        how += note
        for name in set(settings.shares) - set(files.names):
            count, share = int((parts == SPLITS.index(name)).sum()), round(settings.shares[name] * rows)
            if not share / 2 <= count <= 2 * share and abs(count - share) > FEW_ROWS:
                facts.findings.add("SPLIT-SIZE", f"{name} has {counted(count, noun)} instead of about {share:,}", count)
    compare(facts, parts)
    return parts, how


def _provenance(model: Path, into: Path | None, source: str) -> Provenance:
    """Provenance of the stores, before the data is read; ``source`` is a hash of the data.

    If nothing else has changed since the previous validation, its date is kept.
    """
    provenance = Provenance(tokenizer_hash(model), source, date.today().isoformat(), (), "")
    before = read_made(store_path(into, "train")) if into is not None else None
    if before and (before.tokenizer, before.source) == (provenance.tokenizer, source):
        return dataclasses.replace(provenance, made_on=before.made_on)
    return provenance


def _report(
    findings: Findings, source: Path, splits: Mapping[str, SplitReport], made: Provenance, tokenizer: ChatTokenizer,
    form: str, how: str,
) -> DataReport:  # fmt: skip
    listed, opening = tuple(findings.found()), "the generation prompt matches the training format"
    if made.asked:
        opening = f"prompts leave out the generation prompt's {made.asked!r}, as in training"
    elif made.opening:
        opening = f"prompts end with {made.opening!r}, as in training"
    warnings = tuple(finding.message for finding in listed if finding.severity == WARNING)
    stops = tuple(map(tokenizer.token_of, made.stop_ids))
    return DataReport(
        source=str(source), format=form, split=how, warnings=warnings, findings=listed,
        template_date=made.made_on, stop_tokens=stops, opening=opening, **splits,
    )  # fmt: skip


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()


@contextlib.contextmanager
def written(into: Path | None) -> Iterator[Path]:
    """Yield an empty folder that replaces ``into`` at the end, or is deleted if ``into`` is None.

    Raises DiskFullError if the disk is too full for what is written into it.
    """
    parent = Path(tempfile.gettempdir()) if into is None else into.parent
    parent.mkdir(parents=True, exist_ok=True)
    do = "free some space there: scratch and output files take about five times the size of the data"
    scratch = tempfile.TemporaryDirectory(dir=parent, prefix=".validated-")
    with full_disk_named("The disk is full.", parent, do), scratch as name:
        folder = Path(name) / "validated"
        folder.mkdir()
        yield folder
        if into is not None:
            replace_directory(folder, into)


def training_texts(paths: Iterable[Path], columns: Columns | None) -> Iterator[str]:
    """Yield every training text of some files and folders, a few lines at a time; raises DataError."""
    findings = Findings()
    for source in paths:
        files = data_files_of(source, documents=True)
        for path in files.paths[: files.names.count("train")]:  # they come first
            for place, value in rows_of(path, documents=True):
                try:
                    row = parse_row(value, columns)
                except RowError as error:
                    findings.add_error(Spot(str(path), place), error)
                    continue
                for text in (row.text, *(message.content for message in row.messages)):
                    yield from PIECE.findall(text)
    findings.refuse_errors()

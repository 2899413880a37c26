"""Validates a data set: every row read, rendered and tokenized once, split, and written as the later stages map it.

The rows wait on the disk until all are read: a hash of what each asks decides the split.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import psutil

from safetrain.core.data.foreign_rows import Columns
from safetrain.core.data.forms import recognised
from safetrain.core.data.jsonl import bad_rows
from safetrain.core.data.plain_text import PLAIN
from safetrain.core.data.rendering import Labelling
from safetrain.core.data.store import Provenance, StoreWriter, read_made, store_path
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.data.tokenizer_files import tokenizer_hash
from safetrain.core.errors import DataError, NoRowsError
from safetrain.core.formatting import counted
from safetrain.core.records.reports import DataReport, Finding, SplitReport
from safetrain.core.storage.files import replace_directory
from safetrain.plan.figures import SplitFigures
from safetrain.plan.files_by_split import data_files_of
from safetrain.plan.findings import ERROR, WARNING, Findings, Severities, places_text
from safetrain.plan.row_columns import named_when_full
from safetrain.plan.sources import SPLITS, DataFiles, suffix_of, tell_files
from safetrain.plan.splits import MIN_GROUPS, TRAIN, split_off
from safetrain.plan.spool import Spool
from safetrain.plan.survey import Survey
from safetrain.plan.survey_findings import Whole, tell
from safetrain.plan.tokenizing import Limits, RowReader

SAY_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class Source:
    """What to validate and how to split it."""

    path: Path
    valid_fraction: float
    test_fraction: float
    similarity: float  # from which on two questions are near copies; 1: never
    columns: Columns | None = None
    documents: bool = False  # a training from scratch sees them as one stream


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
    files = data_files_of(source.path, documents=source.documents)
    made = _made(files.paths, model, labelling, read_made(store_path(into, "train")))
    findings = Findings(severities)
    tokenizer = ChatTokenizer(model, date.fromisoformat(made.made_on))
    reader = RowReader(tokenizer, labelling, limits, findings, source.columns, documents=source.documents)
    with named_when_full(into.parent), staged(into) as folder, Spool(folder) as spool, Survey(folder) as survey:
        empty = _read(reader, files, spool, survey, say)
        tell_files(findings, files, empty)
        if reader.refused or files.bare(empty):
            raise refused(findings.listed())
        say(f"{counted(len(spool), 'row')} read: comparing them")
        reader.tell_all(spool.labels)
        parts, how = _compare(findings, source, files, survey)
        if findings.has_errors():
            raise refused(findings.listed())
        asked, opening = reader.openings.most_common(1)[0][0] if reader.openings else ("", "")
        made = dataclasses.replace(
            made, stop_ids=reader.stop_ids(), opening=opening, asked=asked, system=reader.system()
        )
        reports = {name: write_split(folder, name, spool, parts, made, files.paths) for name in SPLITS}
        replace_directory(folder, into)
    listed = findings.listed()
    return DataReport(
        source=str(source.path),
        format="+".join(sorted(reader.formats)),
        split=how,
        warnings=tuple(finding.message for finding in listed if finding.severity == WARNING),
        findings=listed,
        template_date=made.made_on,
        stop_tokens=tuple(tokenizer.token_of(number) for number in made.stop_ids),
        opening=_opening_text(asked, opening, labelling),
        train=reports["train"],
        valid=reports["valid"],
        test=reports["test"],
    )


def _made(files: Sequence[Path], model: Path, labelling: Labelling, before: Provenance | None) -> Provenance:
    """What the stores are made with, as far as it is known before the rows are read."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        if suffix_of(path) not in PLAIN:
            with contextlib.suppress(NoRowsError):
                recognised(path)
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    settings = json.dumps(dataclasses.asdict(labelling), sort_keys=True)
    made = Provenance(tokenizer_hash(model), settings, digest.hexdigest(), today().isoformat(), (), "")
    same = before and (before.tokenizer, before.settings, before.source) == (made.tokenizer, settings, made.source)
    return dataclasses.replace(made, made_on=before.made_on) if before and same else made


def today() -> date:
    """By the clock."""
    return date.today()


def refused(findings: tuple[Finding, ...]) -> DataError:
    """One error for everything that ends a validation."""
    lines = []
    for finding in findings:
        if finding.severity == ERROR:
            lines.append(f"  {places_text(finding)}: {finding.message} [{finding.id}]\n    do: {finding.remedy}")
    return DataError("The data cannot be trained as it is:\n" + "\n".join(lines), do="see above; nothing was written")


def _opening_text(asked: str, opening: str, labelling: Labelling) -> str:
    if asked:
        return f"as is trained, without the {asked!r} of the template's generation prompt (data.opening=trained)"
    if opening:
        return f"behind {opening!r}, which is context and not trained (data.train_empty_thinking=false)"
    extra = " (data.opening=prompt)" if labelling.opening == "prompt" else ""
    return f"as the chat template asks, which is what is trained{extra}"


def _read(reader: RowReader, files: DataFiles, spool: Spool, survey: Survey, say: Callable[[str], None]) -> list[Path]:
    """Every row into the spool; gives the files without any. Raises DataError with all that are no rows."""
    total, done, told = sum(path.stat().st_size for path in files.paths), 0, time.monotonic()
    empty = list[Path]()
    for number, path in enumerate(files.paths):
        before = len(spool)
        for block in reader.blocks(path, str(path), only_whole=True):
            spool.add(block, number)
            survey.add(block, number)
            done += sum(read.characters for read in block)
            if time.monotonic() - told > SAY_EVERY_SECONDS:
                told = time.monotonic()
                say(f"{len(spool):,} rows are tokenized, about {min(99, 100 * done // max(1, total))} %")
        if len(spool) == before and not reader.faults and not reader.refused:
            empty.append(path)
    if reader.faults:
        remedy = reader.remedy()
        raise bad_rows(reader.faults, reader.unreadable, f"nothing was written; {remedy or 'correct or remove them'}")
    return empty


def _compare(findings: Findings, source: Source, files: DataFiles, survey: Survey) -> tuple[np.ndarray, str]:
    """The split of each row and how it came to be; what there is to say of all rows together."""
    sides = np.array([SPLITS.index(name) for name in files.names], dtype=np.uint8)
    facts, likeness = survey.facts(), survey.likeness(source.similarity, sides)
    clusters, said = likeness.clusters, ""
    if likeness.by_context:
        said = "; the questions are too few: rows with one question and one system text stay together"
    in_train = facts.by_file(sides == TRAIN)
    if len(np.unique(clusters[in_train])) < MIN_GROUPS:  # all of them near copies: at least the same ones stay together
        clusters, said = likeness.groups, "; all rows are near copies of each other, and such stand on both sides"
    shares = {"valid": source.valid_fraction, "test": source.test_fraction}
    digests = np.concatenate(list(facts.keys("questions")))
    parts, how = split_off(files.names, facts.columns.column("files"), clusters, digests, shares, files.paths[0])
    del digests
    whole = Whole(facts, likeness, parts, [str(path) for path in files.paths], documents=source.documents)
    tell(findings, survey, whole)
    return parts, how if set(files.names) == set(SPLITS) else how + said


def write_split(
    folder: Path, name: str, spool: Spool, parts: np.ndarray, made: Provenance, files: Sequence[Path]
) -> SplitReport:
    """The rows and the store of one split; its figures."""
    figures, label_bytes = SplitFigures(), 0
    with (folder / f"{name}.jsonl").open("wb") as text, StoreWriter(store_path(folder, name)) as store:
        for part in spool.parts(parts == SPLITS.index(name)):
            text.write(part.text)
            first = len(store)
            store.add(part.columns)
            figures.add(part.columns)
            label_bytes += part.label_bytes
            if name == "test":
                for question in spool.asked(part):
                    store.add_question(dataclasses.replace(question, row=first + question.row))
        store.finish(made, [str(path) for path in files], label_bytes)
    return figures.report(label_bytes)


@contextlib.contextmanager
def staged(into: Path) -> Iterator[Path]:
    """A folder beside ``into`` that is gone afterwards, unless it has taken its place."""
    into.parent.mkdir(parents=True, exist_ok=True)
    for left in into.parent.glob(f".{into.name}-new-*"):  # of a validation that was killed
        if not psutil.pid_exists(int(left.name.rpartition("-")[2])):
            shutil.rmtree(left, ignore_errors=True)
    folder = into.parent / f".{into.name}-new-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

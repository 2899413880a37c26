"""The door of the room: a data set validated and written for training, files looked at, a file read as a test set.

Every row is read, rendered and tokenized once. A validation that is written waits on the disk until all rows are
known: a hash of its question decides the split of a row.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import psutil

from safetrain.core.data.held_out import HeldOut, held_out_in
from safetrain.core.data.store import Provenance, open_store, read_made, store_path
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.data.tokenizer_files import tokenizer_hash
from safetrain.core.errors import DataError, NoRowsError
from safetrain.core.formatting import counted
from safetrain.core.model.files import read_limits
from safetrain.core.records.reports import DataReport, Finding
from safetrain.core.storage.files import replace_directory
from safetrain.data.compare import FEW_QUESTIONS, RowFacts, Whole, compare
from safetrain.data.files import PLAIN, recognised
from safetrain.data.findings import ERROR, SHOWN_PLACES, WARNING, Findings, Spot, refused
from safetrain.data.folders import SPLITS, DataFiles, data_files_of, named_files, suffix_of
from safetrain.data.render import Labelling
from safetrain.data.settings import USUAL_SETTINGS, DataSettings, Limits
from safetrain.data.split import TRAIN, split_off
from safetrain.data.spool import Spool, named_when_full
from safetrain.data.tokenize import ReadRow, RowReader, bad_rows

SAY_EVERY_SECONDS = 10.0
WITHOUT_BAD = "safetrain validate FILE --fix NEW --drop-bad"


@dataclass(frozen=True)
class ShownRow:
    """A row as it is trained: pieces of its text, and whether each is trained."""

    where: str  # file:line
    pieces: tuple[tuple[str, bool], ...]
    stops: tuple[str, ...]  # the token that closes each trained piece, empty where nothing does
    findings: tuple[str, ...]  # ids

    @property
    def trained(self) -> tuple[str, ...]:
        """The text of each trained span."""
        return tuple(text for text, is_trained in self.pieces if is_trained)


@dataclass(frozen=True)
class Validation:
    """What is found in some files."""

    rows: tuple[ShownRow, ...]
    found: tuple[tuple[Finding, tuple[Spot, ...]], ...]  # with the places of each
    count: int = 0  # of rows
    tokens: int = 0
    trained_tokens: int = 0
    unmade: tuple[str, ...] = ()  # splits without a file: the pipeline makes them of train
    context: int | None = None  # tokens that the model reads at most, if it says so
    documents: bool = False  # its rows are documents of a training from scratch
    label_bytes: int = 0  # of the text of all labels

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Without their places."""
        return tuple(finding for finding, _ in self.found)

    @property
    def has_errors(self) -> bool:
        """Whether a row, or a file, cannot be trained as it is."""
        return any(finding.severity == ERROR for finding in self.findings)


def validate(
    source: Path, model: Path, limits: Limits, settings: DataSettings, into: Path, say: Callable[[str], None]
) -> DataReport:
    """Write ``into`` the canonical rows and a token store of each split, all or nothing; raises DataError, ModelError.

    Templates are told the date of the validation before, where nothing else has changed since.
    """
    files = data_files_of(source, documents=settings.documents)
    made = _provenance(files.paths, model, settings.labelling, read_made(store_path(into, "train")))
    findings, facts = Findings(settings.severities), RowFacts()
    tokenizer = ChatTokenizer(model, date.fromisoformat(made.made_on))
    reader = RowReader(tokenizer, settings, limits, findings)
    with named_when_full(into.parent), staged(into) as folder, Spool(folder) as spool:
        empty = _read(reader, files, spool, facts, say)
        _tell_files(findings, files, empty)
        if reader.refused or files.without_rows(empty):
            raise refused(findings.listed())
        say(f"{counted(len(spool), 'row')} read: comparing them")
        reader.finish(spool.labels)
        parts, how = _split(findings, settings, files, facts)
        if findings.has_errors():
            raise refused(findings.listed())
        made = _with_endings(made, reader)
        reports = {
            name: spool.write_split(folder, name, parts == number, made, files.paths)
            for number, name in enumerate(SPLITS)
        }
        replace_directory(folder, into)
    listed = findings.listed()
    return DataReport(
        source=str(source),
        format="+".join(sorted(reader.formats)),
        split=how,
        warnings=tuple(finding.message for finding in listed if finding.severity == WARNING),
        findings=listed,
        template_date=made.made_on,
        stop_tokens=tuple(tokenizer.token_of(number) for number in made.stop_ids),
        opening=_opening_text(made, settings.labelling),
        train=reports["train"],
        valid=reports["valid"],
        test=reports["test"],
    )


def validate_files(
    paths: Sequence[Path],
    model: Path,
    shown_rows: int = 3,
    settings: DataSettings = USUAL_SETTINGS,
    most_places: int = SHOWN_PLACES,
) -> Validation:
    """Read every row of ``paths``, files or folders, for ``model``, and compare the files as the splits that they are.

    The first ``shown_rows`` are shown as they are trained, -1: all. A finding has its first ``most_places``. Raises
    ModelError for a model that cannot be read, DataError for what is not there.
    """
    vocabulary, max_positions = read_limits(model)
    files = named_files(paths, documents=settings.documents)
    documents = settings.documents or any(suffix_of(path) in PLAIN for path in files.paths)
    max_positions = None if documents else max_positions  # windows lose nothing
    findings, facts = Findings(settings.severities, most_places), RowFacts()
    settings = dataclasses.replace(settings, documents=documents)
    reader = RowReader(ChatTokenizer(model, date.today()), settings, Limits(vocabulary, max_positions), findings)
    shown, empty = list[ShownRow](), list[Path]()
    count = tokens = trained = label_bytes = 0
    for number, path in enumerate(files.paths):
        for block in _blocks(reader, path, findings, empty):
            facts.add(block, number)
            count += len(block)
            for read in block:
                if read.tokens is not None:
                    label_bytes += read.label_bytes
                    tokens, trained = tokens + len(read.tokens), trained + read.tokens.trained_tokens
                if shown_rows < 0 or len(shown) < shown_rows:
                    shown.append(_shown(read))
    _tell_files(findings, files, empty)
    reader.finish(trained)
    if len(facts):
        sides = _sides(files)[facts.column("files")]
        likeness = facts.likeness(settings.similarity)
        compare(findings, Whole(facts, likeness, sides, [str(path) for path in files.paths]))
    missing = tuple(name for name in SPLITS if name not in files.names) if "train" in files.names else ()
    found = tuple((finding, tuple(places)) for finding, places in findings.with_places())
    return Validation(
        tuple(shown), found, count, tokens, trained, missing, max_positions, documents, label_bytes
    )  # fmt: skip


def read_held_out(
    path: Path, model: Path, settings: DataSettings, max_examples: int | None, max_seq_length: int
) -> HeldOut:
    """The first ``max_examples`` rows of ``path`` (None: all), cut, and what they ask, as ``model`` writes them.

    Raises DataError for a file that is not there, has no rows, or has some that cannot be used; ModelError.
    """
    if not path.is_file():
        what = "The data is a folder." if path.is_dir() else "The data file does not exist."
        raise DataError(what, where=str(path), do="name a file")
    findings, limits = Findings(settings.severities), Limits(*read_limits(model))
    reader = RowReader(ChatTokenizer(model, today()), settings, limits, findings)
    with tempfile.TemporaryDirectory(prefix="safetrain-") as scratch:
        folder = Path(scratch)
        with named_when_full(folder), Spool(folder) as spool:
            for block in reader.blocks(path, only_whole=True):
                spool.add(block, 0)
            if reader.faults:
                raise bad_rows(reader.faults, reader.unreadable, reader.remedy() or "correct or remove them")
            if reader.refused:
                raise refused(findings.listed())
            if not len(spool):
                raise NoRowsError(path)
            made = _with_endings(Provenance(tokenizer_hash(model), "", "", today().isoformat(), (), ""), reader)
            spool.write_split(folder, "test", np.ones(len(spool), dtype=np.bool_), made, [path])
        store = open_store(store_path(folder, "test"))  # mapped: its file may go
    return held_out_in(store, max_examples, max_seq_length)


def today() -> date:
    """The date by the clock."""
    return date.today()


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


def _provenance(files: Sequence[Path], model: Path, labelling: Labelling, before: Provenance | None) -> Provenance:
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


def _with_endings(made: Provenance, reader: RowReader) -> Provenance:
    """The same with what ends and opens the answers of all rows."""
    asked, opening = reader.openings.most_common(1)[0][0] if reader.openings else ("", "")
    return dataclasses.replace(made, stop_ids=reader.stop_ids(), opening=opening, asked=asked, system=reader.system())


def _opening_text(made: Provenance, labelling: Labelling) -> str:
    if made.asked:
        return f"prompts leave out the generation prompt's {made.asked!r}, as in training (data.opening=trained)"
    if made.opening:
        return f"prompts end with {made.opening!r}, which is not trained (data.train_empty_thinking=false)"
    extra = " (data.opening=prompt)" if labelling.opening == "prompt" else ""
    return f"the generation prompt matches the training format{extra}"


def _read(reader: RowReader, files: DataFiles, spool: Spool, facts: RowFacts, say: Callable[[str], None]) -> list[Path]:
    """Every row into the spool; gives the files without any. Raises DataError with all that are not rows."""
    total, done, told = sum(path.stat().st_size for path in files.paths), 0, time.monotonic()
    empty = list[Path]()
    for number, path in enumerate(files.paths):
        before = len(spool)
        for block in reader.blocks(path, only_whole=True):
            spool.add(block, number)
            facts.add(block, number)
            done += sum(len(read.rendered.text) for read in block if read.rendered is not None)
            if time.monotonic() - told > SAY_EVERY_SECONDS:
                told = time.monotonic()
                say(f"{len(spool):,} rows are tokenized, about {min(99, 100 * done // max(1, total))} %")
        if len(spool) == before and not reader.faults and not reader.refused:
            empty.append(path)
    if reader.faults:
        remedy = reader.remedy() or f"correct them, or leave them out: {WITHOUT_BAD}"
        raise bad_rows(reader.faults, reader.unreadable, f"nothing was written; {remedy}")
    return empty


def _split(findings: Findings, settings: DataSettings, files: DataFiles, facts: RowFacts) -> tuple[np.ndarray, str]:
    """The split of each row and how it came to be; what all rows together show."""
    sides = _sides(files)[facts.column("files")]
    likeness = facts.likeness(settings.similarity)
    clusters, said = likeness.clusters, ""
    if likeness.by_context:
        said = "; the questions are too few: rows with one question and one system text stay together"
    if len(np.unique(clusters[sides == TRAIN])) < FEW_QUESTIONS:  # all near copies: at least the same stay together
        clusters, said = likeness.groups, "; all rows are near copies of each other, and such stand on both sides"
    shares = {"valid": settings.valid_fraction, "test": settings.test_fraction}
    digests = facts.keys("questions", in_context=likeness.by_context)
    parts, how = split_off(files.names, facts.column("files"), clusters, digests, shares, files.paths[0])
    compare(findings, Whole(facts, likeness, parts, [str(path) for path in files.paths]))
    return parts, how if set(files.names) == set(SPLITS) else how + said


def _sides(files: DataFiles) -> np.ndarray:
    return np.array([SPLITS.index(name) for name in files.names], dtype=np.uint8)


def _tell_files(findings: Findings, files: DataFiles, empty: Sequence[Path]) -> None:
    """What lies in a data folder and is not read, and which files that were read have no rows."""
    for name in files.unread:
        findings.add("FILES-UNREAD", f"{name} is not read")
    bare = files.without_rows(empty)
    for path in empty:
        if path in bare:
            error = NoRowsError(path)
            findings.add("FILE-UNREADABLE", error.what, where=[Spot(str(path))], remedy=error.do)
        else:
            remedy = "fetch it again, or remove it"
            findings.add("FILES-UNREAD", f"{path.name} has no rows", where=[Spot(str(path))], remedy=remedy)


def _blocks(reader: RowReader, path: Path, findings: Findings, empty: list[Path]) -> Iterator[list[ReadRow]]:
    """The rows of a file; where it has none, it is added to those that are ``empty``."""
    count = 0
    try:
        for block in reader.blocks(path):
            count += len(block)
            yield block
    except DataError as error:  # it cannot be read at all, or no further
        findings.add("FILE-UNREADABLE", error.what, where=[Spot(error.where)], remedy=error.do)
    else:
        empty += [] if count else [path]


def _shown(read: ReadRow) -> ShownRow:
    where = read.spot.text()
    if read.rendered is None or read.tokens is None:
        return ShownRow(where, (), (), read.findings)
    text, spans = read.rendered.text, read.rendered.spans
    pieces, start = list[tuple[str, bool]](), 0
    for span in spans:
        pieces += [(text[start : span.start], False), (text[span.start : span.end], True)]
        start = span.end
    pieces.append((text[start:], False))
    stops = tuple(span.closing for span in spans)
    return ShownRow(where, tuple(piece for piece in pieces if piece[0]), stops, read.findings)

"""The door of the room: data is validated, and written for training or only looked at; a file is read as a test set.

A row goes from its file (files) to a Row (forms), to text with labels (render), to tokens (tokenize), to a split
(split), and to a store (spool). It is read once and waits on the disk until all rows are known: a hash of its question
decides its split.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np
import psutil

from safetrain.core.data.held_out import HeldOut, held_out_in
from safetrain.core.data.store import Provenance, open_store, read_made, store_path
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.data.tokenizer_files import tokenizer_hash
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.core.records.reports import DataReport, Finding, SplitReport
from safetrain.core.storage.files import replace_directory
from safetrain.data.compare import FEW_QUESTIONS, RowFacts, Whole, compare
from safetrain.data.corpus import FORMAT, CorpusReader
from safetrain.data.files import PLAIN
from safetrain.data.findings import ERROR, SHOWN_PLACES, WARNING, Findings, Spot, refused
from safetrain.data.folders import SPLITS, DataFiles, corpus_of, data_files_of, named_files, suffix_of
from safetrain.data.render import Labelling
from safetrain.data.split import TRAIN, split_off
from safetrain.data.spool import SplitWriter, Spool, named_when_full, stored_rows
from safetrain.data.tokenize import DataSettings, ReadRow, RowReader

SAY_EVERY_SECONDS = 10.0
USUAL_SETTINGS = DataSettings()
Say = Callable[[str], None]
Spell = Callable[[int], str]


@dataclass(frozen=True)
class Validation:
    """What was found in some data; where it was written, also what data_report.json says of it."""

    found: Sequence[tuple[Finding, Sequence[Spot]]]  # with the places of each
    rows: Sequence[ReadRow] = ()  # those to show
    count: int = 0  # of rows, refused ones too
    tokens: int = 0
    trained_tokens: int = 0
    label_bytes: int = 0  # of the text of all labels
    unmade: tuple[str, ...] = ()  # splits without a file: the pipeline makes them of train
    context: int | None = None  # tokens that the model reads at most, if it says so
    documents: bool = False  # its rows are documents of a training from scratch
    splits: Mapping[str, SplitReport] = field(default_factory=dict)  # those that were written
    format: str = ""
    how: str = ""  # how the splits came to be
    template_date: str = ""
    stop_tokens: tuple[str, ...] = ()
    opening: str = ""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Without their places."""
        return tuple(finding for finding, _ in self.found)

    @property
    def has_errors(self) -> bool:
        """Whether a row, or a file, cannot be trained as it is."""
        return any(finding.severity == ERROR for finding in self.findings)

    def report(self, source: Path) -> DataReport:
        """data_report.json of the splits that were written."""
        return DataReport(
            source=str(source),
            format=self.format,
            split=self.how,
            warnings=tuple(finding.message for finding in self.findings if finding.severity == WARNING),
            findings=self.findings,
            template_date=self.template_date,
            stop_tokens=self.stop_tokens,
            opening=self.opening,
            **self.splits,
        )


def validate(
    paths: Sequence[Path],
    model: Path,
    settings: DataSettings = USUAL_SETTINGS,
    into: Path | None = None,
    *,
    shown_rows: int = 0,
    most_places: int = SHOWN_PLACES,
    say: Say = lambda _: None,
) -> Validation:
    """Read all data in ``paths``, files or folders, for ``model``; raises ModelError, DataError for what is not there.

    With ``into``, the only path is a data set: canonical rows and a token store of each split are written there, all or
    nothing, and errors in the data raise DataError. Without, files are compared as the splits that they are, errors are
    findings, and the first ``shown_rows`` (-1: all) are kept. A finding has its first ``most_places``.
    """
    gate = _Gate(model, settings, Findings(settings.severities, most_places), say, strict=into is not None)
    corpora = [path for path in paths if path.exists() and corpus_of(path)]
    if corpora and len(paths) > 1:
        do = "name the folder it lies in"
        raise DataError("A corpus of tokens is validated alone.", where=str(corpora[0]), do=do)
    if corpora:
        return gate.look_at_tokens(paths[0]) if into is None else gate.write_tokens(paths[0], into)
    return gate.look_at_rows(paths, shown_rows) if into is None else gate.write_rows(paths[0], into)


def read_held_out(
    path: Path, model: Path, settings: DataSettings, max_examples: int | None, max_seq_length: int
) -> HeldOut:
    """Read the first ``max_examples`` rows of ``path`` (None: all), cut, and what they ask, as ``model`` writes them.

    Raises DataError for a file that is not there, has no rows, or has some that cannot be used; ModelError.
    """
    if not path.is_file():
        what = "The data is a folder." if path.is_dir() else "The data file does not exist."
        raise DataError(what, where=str(path), do="name a file")
    tokenizer, files = ChatTokenizer(model, today()), DataFiles(("test",), (path,))
    reader = RowReader(files, tokenizer, settings, Findings(settings.severities))
    with tempfile.TemporaryDirectory(prefix="safetrain-") as scratch, named_when_full(Path(scratch)):
        with SplitWriter(Path(scratch), "test") as writer:
            for _, block in reader.blocks(strict=True):
                for row in stored_rows(block, 0):
                    writer.add(row)
            made = Provenance(tokenizer_hash(model), "", "", today().isoformat(), (), "")
            writer.finish(reader.provenance(made), [path])
        store = open_store(store_path(Path(scratch), "test"))  # mapped: its file may go
    return held_out_in(store, max_examples, max_seq_length)


def today() -> date:
    """The date by the clock."""
    return date.today()


@dataclass(frozen=True)
class _Gate:
    """The four ways of the door: rows or tokens, written or only looked at."""

    model: Path
    settings: DataSettings
    findings: Findings
    say: Say
    strict: bool  # errors are raised

    def write_rows(self, source: Path, into: Path) -> Validation:
        files, labelling = data_files_of(source, documents=self.settings.documents), self.settings.labelling
        made = _provenance(self.model, labelling, _digest(files.paths), into)
        tokenizer = ChatTokenizer(self.model, date.fromisoformat(made.made_on))
        reader, facts = RowReader(files, tokenizer, self.settings, self.findings), RowFacts()
        size, tell = max(1, sum(path.stat().st_size for path in files.paths)), rarely(self.say)
        with named_when_full(into.parent), staged(into) as folder, Spool(folder) as spool:
            for number, block in reader.blocks(strict=True):
                facts.add(block, number)
                spool.add(stored_rows(block, number))
                tell(f"{reader.rows:,} rows are tokenized, about {min(99, 100 * reader.characters // size)} %")
            self.say(f"{counted(reader.rows, 'row')} read: comparing them")
            parts, how = self._split(files, facts)
            self._refuse_errors()
            made = reader.provenance(made)
            splits = spool.write_splits(folder, parts, made, files.paths)
            replace_directory(folder, into)
        found = self._written(splits, how, made, tokenizer.token_of)
        form, opening = "+".join(sorted(reader.formats)), _opening_text(made, labelling)
        return dataclasses.replace(found, format=form, opening=opening)

    def look_at_rows(self, paths: Sequence[Path], shown_rows: int) -> Validation:
        files = named_files(paths, documents=self.settings.documents)
        documents = self.settings.documents or any(suffix_of(path) in PLAIN for path in files.paths)
        settings = dataclasses.replace(self.settings, documents=documents)
        reader = RowReader(files, ChatTokenizer(self.model, today()), settings, self.findings)
        facts, names, shown = RowFacts(), files.names, list[ReadRow]()
        for number, block in reader.blocks():
            facts.add(block, number)
            shown += block[: len(block) if shown_rows < 0 else shown_rows - len(shown)]
        if len(facts):
            sides = _sides(files, facts)
            likeness = facts.likeness(settings.similarity)
            compare(self.findings, Whole(facts, likeness, sides, list(map(str, files.paths))))
        return Validation(
            found=self.findings.with_places(),
            rows=shown,
            count=reader.rows,
            tokens=reader.tokens,
            trained_tokens=reader.labels,
            label_bytes=reader.label_bytes,
            unmade=tuple(name for name in SPLITS if "train" in names and name not in names),
            context=reader.context,
            documents=documents,
        )

    def look_at_tokens(self, source: Path) -> Validation:
        """What is written meanwhile is gone afterwards."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                return self.write_tokens(source, Path(scratch) / "validated")
            except DataError as error:
                self.findings.add("FILE-UNREADABLE", error.what, where=[Spot(error.where)], remedy=error.do)
        return Validation(self.findings.with_places(), documents=True)

    def write_tokens(self, source: Path, into: Path) -> Validation:
        tokenizer = ChatTokenizer(self.model)
        corpus = CorpusReader(source, tokenizer, rarely(self.say))
        corpus.compare_tokenizers(self.findings)
        self._refuse_errors()
        made = _provenance(self.model, self.settings.labelling, corpus.digest(), into)
        made = dataclasses.replace(made, stop_ids=tuple(sorted(tokenizer.stop_ids)))
        with named_when_full(into.parent), staged(into) as folder:
            splits, how = corpus.write_splits(folder, self.settings.shares, made, self.findings)
            self._refuse_errors()
            replace_directory(folder, into)
        found = self._written(splits, how, made, tokenizer.token_of)
        return dataclasses.replace(found, format=FORMAT, opening="as a text that continues", documents=True)

    def _split(self, files: DataFiles, facts: RowFacts) -> tuple[np.ndarray, str]:
        """(rows,) the split of each row and how it came to be; compares all rows. Raises DataError."""
        sides, likeness, said = _sides(files, facts), facts.likeness(self.settings.similarity), ""
        clusters = likeness.clusters
        if likeness.by_context:
            said = "; the questions are too few: rows with one question and one system text stay together"
        if len(np.unique(clusters[sides == TRAIN])) < FEW_QUESTIONS:  # all near copies: at least the same stay together
            clusters, said = likeness.groups, "; all rows are near copies of each other, and such stand on both sides"
        numbers, digests = facts.column("files"), facts.keys("questions", in_context=likeness.by_context)
        parts, how = split_off(files.names, numbers, clusters, digests, dict(self.settings.shares), files.paths[0])
        compare(self.findings, Whole(facts, likeness, parts, list(map(str, files.paths))))
        return parts, how if set(files.names) == set(SPLITS) else how + said

    def _refuse_errors(self) -> None:
        if self.strict and self.findings.has_errors():
            raise refused(self.findings.listed())

    def _written(self, splits: Mapping[str, SplitReport], how: str, made: Provenance, spell: Spell) -> Validation:
        return Validation(
            found=self.findings.with_places(),
            count=sum(split.rows for split in splits.values()),
            tokens=sum(split.tokens for split in splits.values()),
            trained_tokens=sum(split.trained_tokens for split in splits.values()),
            label_bytes=sum(split.label_bytes for split in splits.values()),
            splits=splits,
            how=how,
            template_date=made.made_on,
            stop_tokens=tuple(map(spell, made.stop_ids)),
        )


def _sides(files: DataFiles, facts: RowFacts) -> np.ndarray:
    """(rows,) the split of each row's file, as an index into SPLITS."""
    return np.array([SPLITS.index(name) for name in files.names], dtype=np.uint8)[facts.column("files")]


def _digest(files: Sequence[Path]) -> str:
    """A hash of all files of rows."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _provenance(model: Path, labelling: Labelling, source: str, into: Path) -> Provenance:
    """What stores are made with, as far as it is known before the data is read; ``source`` is a hash of the data.

    The date is that of the validation before, where nothing else has changed since.
    """
    settings = json.dumps(dataclasses.asdict(labelling), sort_keys=True)
    made = Provenance(tokenizer_hash(model), settings, source, today().isoformat(), (), "")
    before = read_made(store_path(into, "train"))
    if before and (before.tokenizer, before.settings, before.source) == (made.tokenizer, settings, source):
        return dataclasses.replace(made, made_on=before.made_on)
    return made


def _opening_text(made: Provenance, labelling: Labelling) -> str:
    if made.asked:
        return f"prompts leave out the generation prompt's {made.asked!r}, as in training (data.opening=trained)"
    if made.opening:
        return f"prompts end with {made.opening!r}, which is not trained (data.train_empty_thinking=false)"
    extra = " (data.opening=prompt)" if labelling.opening == "prompt" else ""
    return f"the generation prompt matches the training format{extra}"


@contextlib.contextmanager
def staged(into: Path) -> Iterator[Path]:
    """A folder next to ``into`` that is gone afterwards, unless it has taken its place."""
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


def rarely(say: Say) -> Say:
    """Pass on a line each 10 s, and none of the others."""
    told = time.monotonic()

    def tell(line: str) -> None:
        nonlocal told
        if time.monotonic() - told > SAY_EVERY_SECONDS:
            told = time.monotonic()
            say(line)

    return tell

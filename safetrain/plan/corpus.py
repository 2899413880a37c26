"""Validates a corpus of files of tokens: whole, known to the model, split; the tokens stay where they are."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.byte_lengths import byte_lengths
from safetrain.core.data.corpus_store import Corpus, DocumentWriter
from safetrain.core.data.rendering import Labelling
from safetrain.core.data.store import Provenance, metadata_of, read_made, store_path
from safetrain.core.data.token_files import Stretch
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.data.tokenizer_files import tokenizer_hash
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.core.records.reports import DataReport, SplitReport
from safetrain.core.storage.files import replace_directory
from safetrain.plan.corpus_files import TokenizedFile, corpus_of, read_tokenized
from safetrain.plan.corpus_scan import CorpusReader, Known, SplitTally
from safetrain.plan.corpus_splits import DocumentRun, all_of, split_runs
from safetrain.plan.corpus_tokenizer import compare_tokenizers
from safetrain.plan.dataset import SAY_EVERY_SECONDS, Source, refused, staged, today
from safetrain.plan.figures import SplitFigures
from safetrain.plan.files_by_split import links_followed
from safetrain.plan.findings import WARNING, Findings, Severities
from safetrain.plan.row_columns import named_when_full
from safetrain.plan.sources import SPLITS

FORMAT = "tokens of documents (datatrove)"
MOST_TOLD = 3  # ids that open documents end with


@dataclass(frozen=True)
class WrittenSplit:
    """A split as it was written."""

    report: SplitReport
    seen: SplitTally


def validate_corpus(
    source: Source,
    model: Path,
    vocabulary: int,
    labelling: Labelling,
    severities: Severities,
    into: Path,
    say: Callable[[str], None],
) -> DataReport:
    """Write ``into`` where the documents of each split are, all or nothing; raises DataError, ModelError.

    ``vocabulary``: ids that the model has embeddings for.
    """
    by_split = corpus_of(source.path)
    files = [read_tokenized(path) for paths in by_split.values() for path in paths]
    tokenizer, findings = ChatTokenizer(model), Findings(severities)
    runs, how = _splits(by_split, files, source)
    made = _made(files, tokenizer, labelling, read_made(store_path(into, "train")))
    for link in links_followed(source.path, (path for paths in by_split.values() for path in paths)):
        findings.add("LINK-FOLLOWED", link)
    compare_tokenizers(findings, files, tokenizer, min(vocabulary, tokenizer.size))
    if findings.has_errors():
        raise refused(findings.listed())
    reader = CorpusReader(files, _known(tokenizer, vocabulary), _Progress(files, say).said)
    with named_when_full(into.parent), staged(into) as folder:
        written = {name: _write(folder, name, reader, files, runs[name], made) for name in SPLITS}
        _tell(findings, [each.seen for each in written.values()], tokenizer)
        if findings.has_errors():
            raise refused(findings.listed())
        replace_directory(folder, into)
    listed = findings.listed()
    return DataReport(
        source=str(source.path),
        format=FORMAT,
        split=how,
        warnings=tuple(finding.message for finding in listed if finding.severity == WARNING),
        findings=listed,
        template_date=made.made_on,
        stop_tokens=tuple(tokenizer.token_of(number) for number in made.stop_ids),
        opening="as a text that goes on",
        train=written["train"].report,
        valid=written["valid"].report,
        test=written["test"].report,
    )


class _Progress:
    """Says now and then how much has been looked at."""

    def __init__(self, files: Sequence[TokenizedFile], say: Callable[[str], None]) -> None:
        self._total, self._done = sum(each.file.tokens for each in files), 0
        self._say, self._told = say, time.monotonic()

    def said(self, tokens: int) -> None:
        self._done += tokens
        if time.monotonic() - self._told > SAY_EVERY_SECONDS:
            self._told = time.monotonic()
            self._say(f"{self._done:,} of {self._total:,} tokens are checked, {100 * self._done // self._total} %")


def _splits(
    by_split: dict[str, tuple[Path, ...]], files: Sequence[TokenizedFile], source: Source
) -> tuple[dict[str, tuple[DocumentRun, ...]], str]:
    """The documents of each split, and in words how they came to be."""
    names = [name for name, paths in by_split.items() for _ in paths]
    ends = [each.ends for each in files]
    numbers = {name: [number for number, given in enumerate(names) if given == name] for name in by_split}
    runs = {name: all_of(ends, numbers[name]) for name in by_split}
    bare = [name for name, found in runs.items() if not found]
    if bare:
        raise DataError(f"The corpus has no documents for {' and '.join(bare)}.", where=str(source.path))
    shares = {"valid": source.valid_fraction, "test": source.test_fraction}
    missing = {name: share for name, share in shares.items() if name not in runs}
    if not missing:
        return runs, "train, valid and test as given"
    runs |= split_runs(ends, numbers["train"], missing)
    sizes = {name: sum(run.stop - run.first for run in runs[name]) for name in missing}
    listed = " and ".join(f"{name} ({counted(size, 'document')})" for name, size in sizes.items())
    return runs, f"{listed} split off train: runs of neighbours out of many places, always the same"


def _made(
    files: Sequence[TokenizedFile], tokenizer: ChatTokenizer, labelling: Labelling, before: Provenance | None
) -> Provenance:
    """What the stores are made with; the date of the validation before, where nothing else has changed."""
    digest = hashlib.blake2b(digest_size=16)
    for each in files:
        digest.update(
            f"{each.file.path}\0{each.file.digest}\0{hashlib.sha256(each.ends.tobytes()).hexdigest()}".encode()
        )
    settings = json.dumps(dataclasses.asdict(labelling), sort_keys=True)
    stops = tuple(sorted(tokenizer.stop_ids))
    made = Provenance(tokenizer_hash(tokenizer.folder), settings, digest.hexdigest(), today().isoformat(), stops, "")
    kept = before is not None and dataclasses.replace(made, made_on=before.made_on) == before
    return before if before is not None and kept else made


def _known(tokenizer: ChatTokenizer, vocabulary: int) -> Known:
    closing, sizes = np.zeros(vocabulary, dtype=np.bool_), np.zeros(vocabulary, dtype=np.int64)
    closing[[number for number in tokenizer.stop_ids if number < vocabulary]] = True
    own = byte_lengths(tokenizer)[:vocabulary]
    sizes[: len(own)] = own
    return Known(vocabulary, closing, sizes)


def _write(
    folder: Path,
    name: str,
    reader: CorpusReader,
    files: Sequence[TokenizedFile],
    runs: Sequence[DocumentRun],
    made: Provenance,
) -> WrittenSplit:
    """Look at all tokens of a split and write where its documents are."""
    figures, seen, stretches = SplitFigures(), SplitTally(), list[Stretch]()
    with DocumentWriter(store_path(folder, name)) as store:
        for run in runs:
            lengths, labels = reader.read(run, seen)
            there, numbers = lengths > 0, np.arange(run.first + 1, run.stop + 1)
            if not there.any():
                continue
            ends = files[run.file].ends
            begin = int(ends[run.first - 1]) if run.first else 0
            stretches.append(Stretch(run.file, begin, int(ends[run.stop - 1])))
            store.add(lengths[there], labels[there], run.file, numbers[there])
            figures.add_documents(lengths[there], labels[there])
        if not stretches:
            raise DataError(f"All documents of {name} are empty.", where=files[0].file.path)
        corpus = Corpus(tuple(each.file for each in files), tuple(stretches))
        paths = [each.file.path for each in files]
        mean = seen.label_bytes / seen.labels if seen.labels else 0.0
        store.finish(corpus, metadata_of(made, seen.state.hexdigest(), paths, mean))
    return WrittenSplit(figures.report(seen.label_bytes), seen)


def _tell(findings: Findings, splits: Sequence[SplitTally], tokenizer: ChatTokenizer) -> None:
    """What there is to say of all documents."""
    documents, empty = sum(seen.documents for seen in splits), sum(seen.empty for seen in splits)
    left_open = sum(seen.open_documents for seen in splits)
    if empty:
        findings.add("DOCUMENTS-EMPTY", f"{empty} of {documents}", empty)
    if left_open:
        ids: dict[int, int] = {}
        for seen in splits:
            for number, count in seen.last_ids.items():
                ids[number] = ids.get(number, 0) + count
        most = sorted(ids, key=lambda number: -ids[number])[:MOST_TOLD]
        spelled = ", ".join(f"{_spelled(tokenizer, number)} ({ids[number]})" for number in most)
        share = 100 * left_open / documents
        findings.add("DOCUMENTS-OPEN", f"{left_open} of {documents} ({share:.3g} %), most with {spelled}", left_open)


def _spelled(tokenizer: ChatTokenizer, number: int) -> str:
    return repr(tokenizer.token_of(number)) if number < tokenizer.size else str(number)

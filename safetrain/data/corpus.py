"""Validates a corpus of files of tokens: whole, known to the model, split; the tokens stay where they are."""

import dataclasses
import hashlib
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from safetrain.core.data.corpus_store import Corpus, DocumentWriter
from safetrain.core.data.store import Provenance, metadata_of, read_made, store_path
from safetrain.core.data.token_files import OpenFiles, Stretch
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.data.tokenizer_files import tokenizer_hash
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.core.model.files import read_model_files
from safetrain.core.records.reports import DataReport, SplitReport
from safetrain.core.storage.files import replace_directory
from safetrain.data.corpus_files import (
    CorpusReader,
    DocumentRun,
    Known,
    SplitTally,
    TokenizedFile,
    byte_lengths,
    corpus_of,
    read_tokenized,
)
from safetrain.data.findings import ORDER, WARNING, Findings, Severities, Spot, refused
from safetrain.data.folders import SPLITS
from safetrain.data.render import Labelling
from safetrain.data.settings import DataSettings
from safetrain.data.split import SplitFigures
from safetrain.data.spool import named_when_full
from safetrain.data.validate import Validation, staged, today

FORMAT = "tokens of documents (datatrove)"
SEED = 20  # of the choice of splits: the same files give the same splits
MOST_TOKENS = 2_000_000  # of valid and of test: a pass over more tells no more
BLOCKS, RUNS = 1024, 64  # the corpus is cut into blocks, of which so many give a run
SAMPLED, SAMPLE_TOKENS, LEAST_TOKENS = 64, 256, 8  # documents, and tokens of each; shorter ones say little
TAIL = 4  # tokens at the end of a sample, which were joined with what follows
LEAST_SAME = 0.5  # of the sampled documents; with another tokenizer hardly one is
MOST_TOLD = 3  # ids that open documents end with


def validate_corpus(
    source: Path, model: Path, vocabulary: int, settings: DataSettings, into: Path, say: Callable[[str], None]
) -> DataReport:
    """Write ``into`` where the documents of each split are, all or nothing; raises DataError, ModelError.

    ``vocabulary``: ids that the model has embeddings for.
    """
    by_split = corpus_of(source)
    files = [read_tokenized(path) for paths in by_split.values() for path in paths]
    tokenizer, findings = ChatTokenizer(model), Findings(settings.severities)
    runs, how = _splits(by_split, files, source, settings)
    made = _made(files, tokenizer, settings.labelling, read_made(store_path(into, "train")))
    _compare_tokenizers(findings, files, tokenizer, min(vocabulary, tokenizer.size))
    if findings.has_errors():
        raise refused(findings.listed())
    total = sum(each.file.tokens for each in files)
    reader = CorpusReader(
        files, _known(tokenizer, vocabulary), lambda done: say(f"{done:,} of {total:,} tokens checked")
    )
    with named_when_full(into.parent), staged(into) as folder:
        written = {name: _write(folder, name, reader, files, runs[name], made) for name in SPLITS}
        _tell(findings, [seen for _, seen in written.values()], tokenizer)
        if findings.has_errors():
            raise refused(findings.listed())
        replace_directory(folder, into)
    listed = findings.listed()
    return DataReport(
        source=str(source),
        format=FORMAT,
        split=how,
        warnings=tuple(finding.message for finding in listed if finding.severity == WARNING),
        findings=listed,
        template_date=made.made_on,
        stop_tokens=tuple(tokenizer.token_of(number) for number in made.stop_ids),
        opening="as a text that continues",
        train=written["train"][0],
        valid=written["valid"][0],
        test=written["test"][0],
    )


def validate_tokens(path: Path, model: Path, settings: DataSettings) -> Validation:
    """Look at every token of a corpus; what is written meanwhile is gone afterwards. Raises ModelError."""
    vocabulary = read_model_files(model).vocab_size
    lenient = dataclasses.replace(settings, severities=Severities(downgrade=("TOKENIZER-DIFFERS",)))  # none ends it
    with tempfile.TemporaryDirectory() as folder:
        try:
            into = Path(folder) / "validated"
            found = validate_corpus(path, model, vocabulary, lenient, into, lambda _: None)
        except DataError as error:
            findings = Findings(settings.severities)
            findings.add("FILE-UNREADABLE", error.what, where=[Spot(error.where)], remedy=error.do)
            return Validation((), tuple((each, ()) for each in findings.listed()), documents=True)
    splits = [split for _, split in found.splits]
    graded = [dataclasses.replace(each, severity=settings.severities.of(each.id)) for each in found.findings]
    return Validation(
        rows=(),
        found=tuple((each, ()) for each in sorted(graded, key=lambda each: ORDER.index(each.severity))),
        count=sum(split.rows for split in splits),
        tokens=sum(split.tokens for split in splits),
        trained_tokens=sum(split.trained_tokens for split in splits),
        documents=True,
        label_bytes=sum(split.label_bytes for split in splits),
    )


def _splits(
    by_split: dict[str, tuple[Path, ...]], files: Sequence[TokenizedFile], source: Path, settings: DataSettings
) -> tuple[dict[str, tuple[DocumentRun, ...]], str]:
    """The documents of each split, and in words how they came to be."""
    names = [name for name, paths in by_split.items() for _ in paths]
    ends = [each.ends for each in files]
    numbers = {name: [number for number, given in enumerate(names) if given == name] for name in by_split}
    runs = {name: all_of(ends, numbers[name]) for name in by_split}
    bare = [name for name, found in runs.items() if not found]
    if bare:
        raise DataError(f"The corpus has no documents for {' and '.join(bare)}.", where=str(source))
    shares = {"valid": settings.valid_fraction, "test": settings.test_fraction}
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
) -> tuple[SplitReport, SplitTally]:
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
    return figures.report(seen.label_bytes), seen


def _tell(findings: Findings, splits: Sequence[SplitTally], tokenizer: ChatTokenizer) -> None:
    """Say which documents are open, of all splits."""
    documents, ids = sum(seen.documents for seen in splits), sum((seen.open_ends for seen in splits), Counter[int]())
    if ids:
        most = ids.most_common(MOST_TOLD)
        spelled = ", ".join(f"{tokenizer.token_of(number)!r} ({count})" for number, count in most)
        share = 100 * ids.total() / documents
        detail = f"{ids.total()} of {documents} ({share:.3g} %), most with {spelled}"
        findings.add("DOCUMENTS-OPEN", detail, ids.total())


def all_of(ends: Sequence[np.ndarray], files: Sequence[int]) -> tuple[DocumentRun, ...]:
    """All documents of these files; ``ends`` of every file."""
    return tuple(DocumentRun(file, 0, len(ends[file])) for file in files if len(ends[file]))


def split_runs(
    ends: Sequence[np.ndarray], files: Sequence[int], shares: Mapping[str, float]
) -> dict[str, tuple[DocumentRun, ...]]:
    """Divide the documents of these ``files``: a run out of many places to each of ``shares``, the rest to train.

    A split gets about its share of all tokens, at most 2 million, and at most a third of the places; a document is
    never cut. Raises DataError where there are too few documents.
    """
    counts = np.array([len(ends[file]) for file in files], dtype=np.int64)
    borders = np.concatenate([[0], np.cumsum(counts)])  # of the files, counted in documents
    lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(ends[file], prepend=0) for file in files)])
    before = np.concatenate([[0], np.cumsum(lengths)])  # tokens before each document, and all
    if np.count_nonzero(lengths) <= len(shares):
        raise DataError("Too few documents to split.", expected=f"at least {len(shares) + 1}", got=str(len(lengths)))
    blocks = _blocks(before, min(BLOCKS, len(lengths)))
    if len(blocks) <= len(shares):
        blocks = [(int(number), int(number) + 1) for number in np.flatnonzero(lengths)]
    order = np.random.default_rng(SEED).permutation(len(blocks)).tolist()
    taken = dict[str, list[tuple[int, int]]]()
    for place, (name, share) in enumerate(shares.items()):
        own = [blocks[number] for number in order[place :: len(shares) + 1]]
        taken[name] = _chosen(before, own, min(share * float(before[-1]), MOST_TOKENS))
    kept = list[tuple[int, int]]()
    last = 0
    for first, stop in sorted(itertools.chain(*taken.values())):
        kept.append((last, first))
        last = stop
    taken["train"] = [*kept, (last, len(lengths))]
    return {name: tuple(_by_file(runs, borders, files)) for name, runs in taken.items()}


def _blocks(before: np.ndarray, most: int) -> list[tuple[int, int]]:
    """The documents as blocks of about equal tokens, each beginning with one that is not empty."""
    wanted = np.linspace(0, before[-1], most + 1)
    edges = np.unique(np.searchsorted(before, np.floor(wanted), side="right") - 1)
    return [(int(first), int(stop)) for first, stop in itertools.pairwise(edges) if before[stop] > before[first]]


def _chosen(before: np.ndarray, blocks: Sequence[tuple[int, int]], wanted: float) -> list[tuple[int, int]]:
    """The first documents of some blocks, about ``wanted`` tokens of them; of one document at the least."""
    found, tokens = list[tuple[int, int]](), 0
    each = wanted / min(RUNS, len(blocks))
    for first, end in blocks:
        left = min(each, wanted - tokens)
        stop = min(end, int(np.searchsorted(before, before[first] + left, side="right")) - 1)
        if stop <= first and before[first + 1] - before[first] <= wanted - tokens:
            stop = first + 1
        if stop > first and before[stop] > before[first]:
            found.append((first, stop))
            tokens += int(before[stop] - before[first])
        if tokens >= wanted:
            break
    if not found:  # each is longer than the share: the shortest that begins a block
        first = min((first for first, _ in blocks), key=lambda first: before[first + 1] - before[first])
        found = [(first, first + 1)]
    return found


def _by_file(runs: Sequence[tuple[int, int]], borders: np.ndarray, files: Sequence[int]) -> list[DocumentRun]:
    """Runs of documents that are counted over all files, as runs in each."""
    found = []
    for first, stop in runs:
        place = int(np.searchsorted(borders, first, side="right")) - 1
        while first < stop:
            start, end = int(borders[place]), int(borders[place + 1])
            if min(stop, end) > first:
                found.append(DocumentRun(files[place], first - start, min(stop, end) - start))
            first, place = max(first, min(stop, end)), place + 1
    return found


def _compare_tokenizers(
    findings: Findings, files: Sequence[TokenizedFile], tokenizer: ChatTokenizer, vocabulary: int
) -> None:
    """Say where the model's tokenizer did not make the corpus: its text, tokenized again, gives other ids."""
    names = sorted({each.tokenizer for each in files if each.tokenizer})
    samples = [sample for sample in _samples(files) if int(sample.max()) < vocabulary]  # others the scan names
    same = sum(_is_same(sample, tokenizer) for sample in samples)
    named = f", {' and '.join(names)} by its metadata" if names else ""
    if samples and same < LEAST_SAME * len(samples):
        detail = f"of {len(samples)} sampled documents, {same} give their own ids when they are tokenized again{named}"
        findings.add("TOKENIZER-DIFFERS", detail)


def _samples(files: Sequence[TokenizedFile]) -> list[np.ndarray]:
    """The beginnings of documents from all over the corpus, without the token that ends them."""
    found, reader = list[np.ndarray](), OpenFiles()
    having = [each for each in files if len(each.ends)]
    for each in having[:: -(-len(having) // SAMPLED) or 1]:
        starts = np.concatenate([[0], each.ends[:-1]])
        long = np.flatnonzero(each.ends - starts > LEAST_TOKENS)
        wanted = max(1, SAMPLED // len(having))
        for number in long[np.linspace(0, len(long) - 1, min(wanted, len(long))).astype(np.int64)].tolist():
            count = min(SAMPLE_TOKENS, int(each.ends[number] - starts[number]) - 1)
            width = each.file.token_bytes
            raw = reader.read(Path(each.file.path), int(starts[number]) * width, count * width)
            found.append(np.frombuffer(raw, dtype=f"<u{width}"))
    return found


def _is_same(sample: np.ndarray, tokenizer: ChatTokenizer) -> bool:
    """Whether the text of these ids has them; a token at its beginning may be missing, or one more there."""
    ids = sample.tolist()
    again = tokenizer.encode_chat(tokenizer.spell(ids))
    kept = ids[: len(ids) - TAIL]
    return any(again[at : at + len(kept)] == kept for at in (0, 1)) or again[: len(kept) - 1] == kept[1:]

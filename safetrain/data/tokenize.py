"""Reads rows, turns them into tokens with labels, and collects findings, block by block; also the data settings."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from safetrain.core.data.store import Provenance
from safetrain.core.data.token_rows import TokenRow, token_row
from safetrain.core.errors import DataError
from safetrain.core.model.files import read_limits
from safetrain.core.records.schema import Data
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.data.checks import text_findings
from safetrain.data.files import rows_of
from safetrain.data.findings import Findings, Spot, checked_downgrade
from safetrain.data.folders import DataFiles
from safetrain.data.forms import Columns, checked_columns, named_columns, parse_row
from safetrain.data.masks import REASONING_KEYS
from safetrain.data.render import NOTHING_WRITTEN, RenderedRow, Renderer
from safetrain.data.rows import PAIRS, Row, RowError

BLOCK_ROWS, BLOCK_CHARACTERS = 512, 2**20  # a block ends with the row that reaches either limit
AHEAD = 2  # blocks that wait for the tokenizer while the next one is rendered
USUAL_TURN_KEYS = {"tool_calls", "tool_call_id", "name", "refusal", *REASONING_KEYS}
Runs = list[tuple[int, int]]  # first and last token of each span of labels
Tokenized = list[tuple[TokenRow, Runs]]
# Of a row's judged answer: its first and last token, the row's text before it, the message before it
Prompt = tuple[int, int, str, str]


@dataclass(frozen=True)
class DataSettings:
    """The settings under data in params.yaml that determine how rows are read, labelled and split."""

    downgrade: tuple[str, ...] = ()  # kinds of findings that are one severity lower
    columns: Columns | None = None
    similarity: float = 0.8  # two questions at least this similar are near-duplicates; 1: only identical ones
    shares: Mapping[str, float] = field(default_factory=lambda: {"valid": 0.1, "test": 0.1})  # split off train
    documents: bool = False  # for pretraining: rows are documents, which the context does not truncate


def settings_of(data: Data | Any, words: Iterable[str] = (), *, documents: bool = False) -> DataSettings:
    """Read the section data of params.yaml, if there is one; ``words`` of --columns override it. Raises ConfigError."""
    columns = named_columns(words)
    if data is None:
        return DataSettings(columns=columns)
    return DataSettings(
        downgrade=checked_downgrade(data.downgrade or ()),
        columns=columns or checked_columns(data.columns),
        similarity=data.near_duplicate_similarity,
        shares=dict.fromkeys(("valid", "test"), data.held_out_fraction),
        documents=documents,
    )


@dataclass(slots=True)
class ReadRow:
    """A row as it was read, rendered and tokenized; ``tokens`` is None if it cannot be trained on.

    A pair is two: prompt with chosen answer, then prompt with rejected answer.
    """

    spot: Spot
    row: Row | None
    rendered: RenderedRow | None
    tokens: TokenRow | None
    findings: tuple[str, ...]  # ids
    prompt: Prompt | None = None  # None if the row has no answer to a prompt
    label_bytes: int = 0  # UTF-8 bytes of its answers, without their stop tokens


class RowReader:
    """Reads a data set for one model. The tokenizer library works on all cores while the next block is rendered."""

    def __init__(self, files: DataFiles, tokenizer: ChatTokenizer, settings: DataSettings, findings: Findings) -> None:
        """Raises ModelError if the model cannot be used."""
        self.rows = 0  # pairs count once; including those that cannot be trained on
        self.tokens, self.labels, self.label_bytes = 0, 0, 0  # of the rows that can be trained on
        self.formats: set[str] = set()
        self._files = files
        self._openings = collections.Counter[tuple[str, str]]()  # in the prompt, and in training
        self._tokenizer, self._settings, self._findings = tokenizer, settings, findings
        self._vocabulary, context = read_limits(tokenizer.folder)
        self.context = None if settings.documents else context  # in tokens; windows truncate nothing
        self._renderer = Renderer(tokenizer.template, tokenizer.controls, tokenizer.end_token)
        self._stops = tokenizer.stop_ids  # computed now: this renders, which the tokenizer's thread must not do
        self._closings: set[str] = set()  # tokens that close the trained answers
        self._inside: set[str] = set()  # those of _closings that also occur inside an answer
        self._systems: set[str] = set()  # the first two different system prompts, "" for none

    def blocks(self) -> Iterator[tuple[int, list[ReadRow]]]:
        """Yield all rows in order, a few hundred at a time, with the index of their file. Errors become findings."""
        waiting = collections.deque[tuple[int, list[ReadRow], Future[Tokenized]]]()
        with ThreadPoolExecutor(1, "tokenizer") as pool:
            for number, path in enumerate(self._files.paths):
                for block in self._rendered_blocks(path):
                    texts = [each.rendered for each in block if each.rendered is not None]
                    waiting.append((number, block, pool.submit(self._tokenize, texts)))
                    if len(waiting) > AHEAD:
                        yield self._finished(*waiting.popleft())
            while waiting:
                yield self._finished(*waiting.popleft())
        for name in self._files.unread:
            self._findings.add("FILES-UNREAD", f"{name} is not read")

    @property
    def has_pairs(self) -> bool:
        """Whether the rows that were read are preference pairs."""
        return PAIRS in self.formats

    def provenance(self, provenance: Provenance) -> Provenance:
        """Add stop tokens, opening and the common system prompt, once all rows are read.

        Stop tokens are the model's own and those that close trained answers and do not occur inside one. If all rows
        are bare text, they are the tokens with which the template closes an answer.
        """
        learned_stops = {self._tokenizer.id_of(token) for token in self._closings - self._inside}
        stops = tuple(sorted(self._tokenizer.model_stop_ids | learned_stops if learned_stops else self._stops))
        asked, opening = self._openings.most_common(1)[0][0] if self._openings else ("", "")
        system = next(iter(self._systems)) if len(self._systems) == 1 else ""
        return replace(provenance, stop_ids=stops, opening=opening, asked=asked, system=system)

    def _rendered_blocks(self, path: Path) -> Iterator[list[ReadRow]]:
        block, room = list[ReadRow](), BLOCK_CHARACTERS
        try:
            for place, value in rows_of(path, documents=self._settings.documents):
                rows = self._rendered(Spot(str(path), place), value)
                block += rows
                room -= sum(len(row.rendered.text) for row in rows if row.rendered is not None)
                if len(block) >= BLOCK_ROWS or room <= 0:
                    yield block
                    block, room = [], BLOCK_CHARACTERS
        except DataError as error:  # without rows, or damaged from some row on
            self._findings.add("FILE-UNREADABLE", error.what, where=[Spot(error.where)], remedy=error.do)
        yield block

    def _rendered(self, spot: Spot, value: object) -> list[ReadRow]:
        """Read and render a row, or both rows of a pair."""
        row: Row | None = None
        try:
            row = parse_row(value, self._settings.columns)
            if self.formats and (row.format == PAIRS) != self.has_pairs:
                do = "keep them in two data sets"
                raise RowError("pairs (chosen, rejected) and other rows are mixed in a data set", do=do)
            both = [(each, self._renderer.render(each)) for each in row.divided()]
        except RowError as error:
            if error.id == "ANSWER-LOST":  # only ANSWER-LOST can be downgraded to a warning
                self._findings.add("NO-LABELS", NOTHING_WRITTEN, where=[spot])
            self._findings.add_error(spot, error)
            return [ReadRow(spot, row, None, None, (error.id,))]
        return [ReadRow(spot, each, rendered, None, self._find(each, rendered, spot)) for each, rendered in both]

    def _find(self, row: Row, rendered: RenderedRow, spot: Spot) -> tuple[str, ...]:
        """Add the findings about a row, and note how its answers open and close; returns the ids of the findings."""
        self.formats.add(row.format)
        if len(self._systems) < 2:
            self._systems.add(row.system)
        self._closings.update(span.closing for span in rendered.spans if span.closing)
        unsure, answers = self._closings - self._tokenizer.controls.stops - self._inside, _answers(rendered)
        self._inside |= {token for token in unsure if any(token in answer for answer in answers)}
        if rendered.is_chat:
            self._openings[rendered.asked, rendered.opening] += 1
        found = [*text_findings(row, self._tokenizer.controls), *rendered.remarks]
        turn_keys = {key for message in row.messages for key in message.keys} - USUAL_TURN_KEYS
        templates = "".join(self._tokenizer.template.sources.values())
        unread = [f"messages[].{key}" for key in sorted(turn_keys) if key not in templates]
        found += [("KEYS-IGNORED", key) for key in (*row.ignored_keys, *unread)]
        found += [("COLUMNS-TAKEN", row.taken)] if row.taken else []
        for identifier, detail in dict.fromkeys(found):
            self._findings.add(identifier, detail, where=[spot])
        return tuple(dict(found))

    def _tokenize(self, rows: Sequence[RenderedRow]) -> Tokenized:
        encodings = iter(self._tokenizer.encode_chats([row.text for row in rows if row.is_chat]))
        return [labelled(row, next(encodings)) if row.is_chat else self._document(row) for row in rows]

    def _document(self, row: RenderedRow) -> tuple[TokenRow, Runs]:
        ids = text_ids(row.text, self._tokenizer)
        return token_row(ids, [True] * len(ids)), [(0, len(ids) - 1)]

    def _finished(self, number: int, block: list[ReadRow], tokenized: "Future[Tokenized]") -> tuple[int, list[ReadRow]]:
        """Attach tokens to the rows of a block that can be trained on, and count them."""
        results, chosen = iter(tokenized.result()), None
        for read in block:
            is_rejected = read.row is not None and read.row.is_rejected
            if not is_rejected:
                self.rows, chosen = self.rows + 1, None
            if read.rendered is None:
                continue
            tokens, runs = next(results)
            obstacle = self._obstacle(tokens, runs)
            if obstacle is not None:
                self._findings.add(*obstacle, where=[read.spot])
                read.findings += (obstacle[0],)
                if obstacle[0] != "BEYOND-CONTEXT":
                    continue
            read.tokens = tokens
            read.label_bytes = sum(len(text.encode()) for text in _answers(read.rendered))
            self.tokens += len(tokens)
            self.labels += tokens.labels
            self.label_bytes += read.label_bytes
            if is_rejected and chosen is not None:
                self._compare(chosen, tokens, read)
            chosen = tokens
            if read.rendered.question is not None and not is_rejected:
                judged = read.rendered.judged
                text = read.rendered.text[: read.rendered.spans[judged].start]
                read.prompt = (*runs[judged], text, read.rendered.question)
        return number, block

    def _compare(self, chosen: TokenRow, rejected: TokenRow, read: ReadRow) -> None:
        if np.array_equal(chosen.ids[: self.context], rejected.ids[: self.context]):
            is_cut = self.context is not None and max(len(chosen), len(rejected)) > self.context
            detail = f" within the model's context ({self.context} tokens)" if is_cut else ""
            self._findings.add("NO-PREFERENCE", detail, where=[read.spot])
            read.findings += ("NO-PREFERENCE",)

    def _obstacle(self, tokens: TokenRow, runs: Runs) -> tuple[str, str] | None:
        """The finding's id and detail if a row cannot be trained on, or only in part."""
        if not any(last > 0 for _, last in runs):  # a row's first token is never a label
            return "NO-LABELS", "no answer was found"
        size, last = self._vocabulary, int(tokens.ids.max())
        if size is not None and last >= size:
            return "TOKEN-BEYOND-EMBEDDING", f"{self._tokenizer.token_of(last)!r} (id {last}, of {size} embeddings)"
        limit = self.context or len(tokens)
        if runs[0][0] >= limit:
            return "NO-LABELS", f"the answer begins beyond the model's context ({limit} tokens)"
        return ("BEYOND-CONTEXT", f"everything beyond {limit} tokens is lost") if len(tokens) > limit else None


def labelled(row: RenderedRow, encoding: Any) -> tuple[TokenRow, Runs]:
    """Take a rendered row's ids and labels from the tokenizer library's ``encoding`` of its text."""
    ids = np.array(encoding.ids, dtype=np.uint32)
    trained = np.zeros(len(ids), dtype=np.bool_)
    runs: Runs = []
    for span in row.spans:
        first = _token_at(encoding, range(span.start, span.end))
        last = _token_at(encoding, range(span.end - 1, span.start - 1, -1))
        if first is not None and last is not None:
            trained[first : last + 1] = True
            runs.append((first, last))
    return TokenRow(ids, trained), runs


def text_ids(text: str, tokenizer: ChatTokenizer) -> list[int]:
    """Ids of a bare text, ending with the end-of-text token, which is added if missing."""
    ids, end, stops = tokenizer.encode(text), tokenizer.end_id, tokenizer.stop_ids
    is_ended = ids and (ids[-1] in stops or text.rstrip().endswith(tuple(map(tokenizer.token_of, stops))))
    return ids if end is None or is_ended else [*ids, end]


def _answers(rendered: RenderedRow) -> list[str]:
    """The answers that are trained on, without their stop tokens."""
    return [rendered.text[span.start : span.end - len(span.closing)] for span in rendered.spans]


def _token_at(encoding: Any, characters: range) -> int | None:
    """The index of the token at the first character that has one: some tokenizers drop white space."""
    return next((token for place in characters if (token := encoding.char_to_token(place)) is not None), None)

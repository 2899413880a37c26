"""The rows of a file as tokens with labels, block by block, with findings about them."""

import collections
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from safetrain.core.data.token_rows import TokenRow
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import DataError, NoRowsError
from safetrain.core.formatting import counted
from safetrain.data.checks import text_findings
from safetrain.data.containers import Place
from safetrain.data.files import PLAIN, rows_of, texts_of
from safetrain.data.findings import Findings, Spot
from safetrain.data.folders import suffix_of
from safetrain.data.forms import as_setting, parse_row
from safetrain.data.masks import RenderError
from safetrain.data.render import NOTHING_WRITTEN, RenderedRow, Renderer
from safetrain.data.rows import Row
from safetrain.data.settings import DataSettings, Limits
from safetrain.data.strict_json import RowError

BLOCK_ROWS, BLOCK_CHARACTERS = 512, 2**20  # a block ends with the row that passes one of them
AHEAD = 2  # blocks that are tokenized while the next one is rendered
MOST_FAULTS, SHOWN_FAULTS, SHOWN_PLACES = 10_000, 20, 5
HEADER_CHARACTERS, KEPT_HEADERS = 80, 1024
Runs = tuple[tuple[int, int], ...]  # first and last token of each trained span


@dataclass(frozen=True, slots=True)
class Fault:
    """Why something is not a row, and where it stands."""

    spot: Spot
    error: RowError

    @property
    def where(self) -> str:
        """With the column where that is known."""
        place = self.spot.place
        return self.spot.file if place is None else place.of(self.spot.file, self.error.column)


@dataclass(frozen=True, slots=True)
class ReadRow:
    """One row from its line to its tokens. ``tokens`` is None where it cannot be trained; ``findings`` are ids."""

    spot: Spot
    row: Row | None
    rendered: RenderedRow | None
    tokens: TokenRow | None
    findings: tuple[str, ...]
    asked_at: int | None = None  # the token at which its last answer begins; None where it cannot be asked
    prompt: list[int] | None = None  # that ask for it, where they are not the row's tokens up to there

    @property
    def place(self) -> Place:
        """Where it stands in its file."""
        return self.spot.place or Place(0)

    @property
    def label_bytes(self) -> int:
        """UTF-8 bytes of the text of its labels, without the tokens that close answers."""
        if self.rendered is None:
            return 0
        text, spans = self.rendered.text, self.rendered.spans
        return sum(len(text[span.start : span.end - len(span.closing)].encode("utf-8")) for span in spans)


class RowReader:
    """Reads files for one model. The tokenizer library works on all cores while the next block is rendered."""

    def __init__(self, tokenizer: ChatTokenizer, settings: DataSettings, limits: Limits, findings: Findings) -> None:
        self.faults: list[Fault] = []  # of what is not a row
        self.unreadable, self.refused, self.parsed = 0, 0, 0  # refused: unreadable, or cannot be trained
        self.formats: set[str] = set()
        self.closings = collections.Counter[str]()  # tokens that close the trained answers
        self.openings = collections.Counter[tuple[str, str]]()  # what a prompt opens with, and what training shows
        self._tokenizer, self._settings, self._limits, self._findings = tokenizer, settings, limits, findings
        self._renderer = Renderer(tokenizer.template, tokenizer.controls, settings.labelling, tokenizer.end_token)
        self._stops = tokenizer.stop_ids  # found now: it renders, which the tokenizer's thread must not
        self._inside: set[str] = set()  # closing tokens that also stand inside an answer
        self._systems: set[str] = set()  # system prompts, "" for none: the first two that differ
        self._cut_labels, self._cut = 0, list[Spot]()  # beyond the model's context
        self._headers: dict[str, list[int]] = {}

    def blocks(self, path: Path, *, only_whole: bool = False) -> Iterator[list[ReadRow]]:
        """Every row of ``path``, in order, some hundred at a time; raises DataError. A file without rows gives none.

        With ``only_whole``, rows after an unreadable one are only parsed, so that all unreadable lines are found
        quickly.
        """
        waiting = collections.deque[tuple[list[ReadRow], Future[list[tuple[TokenRow, Runs]]]]]()
        with ThreadPoolExecutor(1, "tokenizer") as pool:
            for block in self._rendered_blocks(path, only_whole):
                texts = [item.rendered for item in block if item.rendered is not None]
                waiting.append((block, pool.submit(self._tokenize, texts)))
                if len(waiting) > AHEAD:
                    yield list(self._checked(*_next(waiting)))
            while waiting:
                yield list(self._checked(*_next(waiting)))

    def remedy(self) -> str:
        """Where no row could be read, all for one reason: what to do; else empty."""
        if self.parsed or len({str(fault.error) for fault in self.faults}) != 1:
            return ""
        error = self.faults[0].error
        if error.columns:
            lines = "".join(f"\n{'':12}{as_setting(columns)}" for columns in error.columns)
            return f"name the keys, in params.yaml or, as --columns PART=KEY, on the command line:{lines}"
        several = "all rows have this fault: correct what wrote the file, and write it again"
        return error.do or (several if len(self.faults) > 1 else "")

    def finish(self, labels: int) -> None:
        """Once all rows are read, with ``labels`` in all: what is found in all of them together."""
        if self.unreadable and (remedy := self.remedy()):
            self._findings.add("ROW-UNREADABLE", str(self.faults[0].error), 0, remedy=remedy)
        if self._cut:
            share = 100 * self._cut_labels / max(1, labels)
            said = f"{self._limits.max_positions} tokens; {self._cut_labels} labels ({share:.2g} % of all) are lost"
            self._findings.add("BEYOND-CONTEXT", said, len(self._cut), self._cut[: self._findings.most_places])

    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the model's own, and the tokens that close trained answers and stand nowhere else.

        Where all rows are bare text, the tokens with which the template would close an answer.
        """
        taught = {self._tokenizer.id_of(token) for token in self.closings if token and token not in self._inside}
        return tuple(sorted(self._tokenizer.model_stop_ids | taught if taught else self._stops))

    def system(self) -> str:
        """The system prompt that every row has; empty where they differ, or have none."""
        return next(iter(self._systems)) if len(self._systems) == 1 else ""

    def _rendered_blocks(self, path: Path, only_whole: bool) -> Iterator[list[ReadRow]]:
        name = str(path)
        is_plain = self._settings.documents and suffix_of(path) in PLAIN
        block, left = list[ReadRow](), BLOCK_CHARACTERS
        try:
            for place, value in texts_of(path) if is_plain else rows_of(path):
                read = self._rendered(Spot(name, place), value, only_whole)
                if read is None:
                    continue
                block.append(read)
                left -= len(read.rendered.text) if read.rendered is not None else 0
                if len(block) == BLOCK_ROWS or left <= 0:
                    yield block
                    block, left = [], BLOCK_CHARACTERS
        except NoRowsError:
            return
        yield block

    def _rendered(self, spot: Spot, value: object, only_whole: bool) -> ReadRow | None:
        try:
            if isinstance(value, RowError):
                raise value
            row = parse_row(value, self._settings.columns)
        except RowError as error:
            if len(self.faults) < MOST_FAULTS:
                self.faults.append(Fault(spot, error))
            self.unreadable += 1
            return self._refused(spot, None, "ROW-UNREADABLE", str(error))
        self.parsed += 1
        if only_whole and self.faults:
            return None
        try:
            rendered = self._renderer.render(row)
        except RenderError as error:
            if error.id == "ANSWER-LOST":  # it may be taken for a warning: that nothing is left may not
                self._findings.add("NO-LABELS", NOTHING_WRITTEN, where=[spot])
            return self._refused(spot, row, error.id, str(error))
        return ReadRow(spot, row, rendered, None, self._find(row, rendered, spot))

    def _refused(self, spot: Spot, row: Row | None, identifier: str, detail: str) -> ReadRow:
        self._findings.add(identifier, detail, where=[spot])
        self.refused += 1
        return ReadRow(spot, row, None, None, (identifier,))

    def _find(self, row: Row, rendered: RenderedRow, spot: Spot) -> tuple[str, ...]:
        """Count the findings about a row, and what closes and opens its answers; gives the ids of the findings."""
        self.formats.add(row.format)
        if len(self._systems) < 2:
            self._systems.add(row.system)
        for span in rendered.spans:
            self.closings[span.closing] += 1
        for token in [token for token in self.closings if token and token not in self._tokenizer.controls.stops]:
            if any(token in rendered.text[span.start : span.end - len(span.closing)] for span in rendered.spans):
                self._inside.add(token)
        if rendered.is_chat:
            self.openings[rendered.asked, rendered.opening] += 1
        found = text_findings(row, self._tokenizer.controls)
        if not (found or rendered.remarks or row.remarks or row.ignored_keys or row.taken):
            return ()
        found += rendered.remarks
        found += [(identifier, "") for identifier in row.remarks]
        found += [("KEYS-IGNORED", key) for key in row.ignored_keys]
        found += [("COLUMNS-TAKEN", row.taken)] if row.taken else []
        for identifier, detail in dict.fromkeys(found):
            self._findings.add(identifier, detail, where=[spot])
        return tuple(dict.fromkeys(identifier for identifier, _ in found))

    def _tokenize(self, rows: Sequence[RenderedRow]) -> list[tuple[TokenRow, Runs]]:
        """Ids and labels of rendered rows, in one batch."""
        encodings = iter(self._tokenizer.encode_chats([row.text for row in rows if row.is_chat]))
        return [labelled(row, next(encodings)) if row.is_chat else self._whole_text(row) for row in rows]

    def _whole_text(self, row: RenderedRow) -> tuple[TokenRow, Runs]:
        ids = text_ids(row.text, self._tokenizer)
        tokens = TokenRow(np.array(ids, dtype=np.uint32), np.ones(len(ids), dtype=np.bool_))
        return tokens, ((0, len(ids) - 1),)

    def _checked(self, read: Sequence[ReadRow], made: Sequence[tuple[TokenRow, Runs]]) -> Iterator[ReadRow]:
        """The rows with their tokens, if they can be trained."""
        tokenized = iter(made)
        for item in read:
            if item.rendered is None:
                yield item
                continue
            tokens, runs = next(tokenized)
            fault = self._fault(tokens, runs)
            if fault is not None:
                self._findings.add(*fault, where=[item.spot])
                self.refused += 1
                yield ReadRow(item.spot, item.row, item.rendered, None, (*item.findings, fault[0]))
                continue
            found, limit = item.findings, self._limits.max_positions
            if limit is not None and len(tokens) > limit:
                self._cut_labels += int(np.count_nonzero(tokens.trained[limit:]))
                self._cut.append(item.spot)
                found = (*found, "BEYOND-CONTEXT")
            asked_at = runs[-1][0] if item.rendered.can_be_asked else None
            prompt = None if asked_at is None else self._other_prompt(item.rendered, tokens, asked_at)
            yield ReadRow(item.spot, item.row, item.rendered, tokens, found, asked_at, prompt)

    def _fault(self, tokens: TokenRow, runs: Runs) -> tuple[str, str] | None:
        """Why a row cannot be trained: the id of the finding and its detail."""
        if not any(last for _, last in runs):  # nothing stands before a row's first token
            return "NO-LABELS", "nothing in it is an answer"
        vocabulary, limit = self._limits.vocabulary, self._limits.max_positions
        if vocabulary is not None and self._tokenizer.size > vocabulary and tokens.ids.max() >= vocabulary:
            number = int(tokens.ids.max())
            return "TOKEN-BEYOND-EMBEDDING", f"{self._tokenizer.token_of(number)!r} ({number} of {vocabulary})"
        if limit is not None and runs[0][0] >= limit:
            return "NO-LABELS", f"the answer begins beyond the model's context ({limit} tokens)"
        return None

    def _other_prompt(self, rendered: RenderedRow, row: TokenRow, asked_at: int) -> list[int] | None:
        """The ids that ask for the last answer, where they are not the row's tokens up to there.

        They may differ where a header ends in plain text: the tokenizer then joins what it asks and what is answered.
        """
        text = rendered.text[: rendered.spans[-1].start]
        header = self._header_ids(text)
        if header is not None and header == row.ids[asked_at - len(header) : asked_at].tolist():
            return None
        prompt = self._tokenizer.encode_chat(text)
        return None if prompt == row.ids[:asked_at].tolist() else prompt

    def _header_ids(self, text: str) -> list[int] | None:
        """Ids of what stands in ``text`` after its last added token, if that is near; None if it is not.

        Nothing is joined across an added token, so that what stands before it does not matter.
        """
        window = text[-HEADER_CHARACTERS:]
        found = self._tokenizer.controls.found_in(window)
        if not found:
            return None
        header, encode = window[found[-1][0] :], self._tokenizer.encode_chat
        if header not in self._headers:
            if len(self._headers) >= KEPT_HEADERS:
                self._headers.clear()
            self._headers[header] = encode(header)[len(encode(found[-1][1])) :]
        return self._headers[header]


def labelled(row: RenderedRow, encoding: Any) -> tuple[TokenRow, Runs]:
    """Ids and labels of a rendered row by the tokenizer library's ``encoding`` of its text."""
    ids = np.array(encoding.ids, dtype=np.uint32)
    trained = np.zeros(len(ids), dtype=np.bool_)
    runs = list[tuple[int, int]]()
    for span in row.spans:
        first, last = encoding.char_to_token(span.start), encoding.char_to_token(span.end - 1)
        if first is None or last is None:  # some tokenizers drop white space
            first = _token_at(encoding, range(span.start, span.end))
            last = _token_at(encoding, range(span.end - 1, span.start - 1, -1))
        if first is not None and last is not None:
            trained[first : last + 1] = True
            runs.append((first, last))
    return TokenRow(ids, trained), tuple(runs)


def text_ids(text: str, tokenizer: ChatTokenizer) -> list[int]:
    """Ids of a bare text; one that ends a text is the last, unless the text has it already."""
    ids, end, stops = tokenizer.encode(text), tokenizer.end_id, tokenizer.stop_ids
    is_ended = ids and (ids[-1] in stops or text.rstrip().endswith(tuple(map(tokenizer.token_of, stops))))
    return ids if end is None or is_ended else [*ids, end]


def bad_rows(faults: Sequence[Fault], total: int | None = None, do: str = "") -> DataError:
    """One error for all bad rows: twenty different faults are listed, each once, with the places that share it."""
    places: dict[str, list[str]] = {}
    for fault in faults:
        places.setdefault(str(fault.error), []).append(fault.where)
    listed, told = list[str](), 0
    for text, where in list(places.items())[:SHOWN_FAULTS]:
        listed.append(f"  {where[0]}: {text}")
        told += len(where)
        if len(where) > 1:
            others = "; ".join(where[1 : SHOWN_PLACES + 1]) + ("; …" if len(where) > SHOWN_PLACES + 1 else "")
            listed.append(f"    the same in {counted(len(where) - 1, 'more row')}: {others}")
    total = len(faults) if total is None else total  # of which these are the first
    listed += [f"  and {total - told} more"] if total > told else []
    what = "\n".join([f"The data has {counted(total, 'bad row')}:", *listed])
    return DataError(what, do=do or "correct or remove them; nothing was written")


def _token_at(encoding: Any, characters: range) -> int | None:
    """The token of the first of ``characters`` that has one."""
    return next((token for place in characters if (token := encoding.char_to_token(place)) is not None), None)


def _next(
    waiting: "collections.deque[tuple[list[ReadRow], Future[list[tuple[TokenRow, Runs]]]]]",
) -> tuple[list[ReadRow], list[tuple[TokenRow, Runs]]]:
    read, future = waiting.popleft()
    return read, future.result()

"""Scores one answer, from 0 to 1, by what its row expects: a text, an option, JSON, or calls of tools.

A scorer takes the row, the expected text and the answer (both without thinking and outer spaces). It is a function of
these alone. The checker is one whose program is the user's: a child that reads and writes lines of JSON.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
from referencing.exceptions import Unresolvable

from safetrain.core.data.store import Call, Canonical, calls_due, same_calls, same_value
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.text.words import words_of
from safetrain.engine.upstream.tool_calls import ToolCalls

NOT_JSON, REFUSED, WRONG_ARGUMENT = "not JSON", "refused by the schema", "wrong argument"  # mistakes


@dataclass(frozen=True)
class AnswerScore:
    """The score of an answer, its parts (each 0 to 1), and what is wrong with it in a few words."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    note: str = ""


Scorer = Callable[[Canonical, str, str], AnswerScore]


def judge_text(_row: Canonical, expected: str, answer: str) -> AnswerScore:
    """Exact match; a part is the F1 of the words."""
    return AnswerScore(float(answer == expected), {"token_f1": token_f1(answer, expected)})


def judge_choice(_row: Canonical, expected: str, answer: str) -> AnswerScore:
    return AnswerScore(float(answer == expected))


def token_f1(answer: str, expected: str) -> float:
    """F1 of the words in any order, ignoring case and punctuation; 0 to 1."""
    words = words_of([answer, expected])
    split = int(words.bounds[1])
    if not len(words.hashes):
        return float(answer == expected)
    one, other = Counter(words.hashes[:split].tolist()), Counter(words.hashes[split:].tolist())
    return 2 * (one & other).total() / (one.total() + other.total())


# JSON


def json_scorer(schema: Path | None) -> Scorer:
    """A scorer of JSON: the share of fields that are right, of those in the answer or expected; raises ConfigError.

    An answer that is not JSON, or that the schema refuses, scores 0.
    """
    validator = schema_in(schema) if schema else None

    def judge(_row: Canonical, expected: str, answer: str) -> AnswerScore:
        parts = {"is_json": 0.0, "exact": 0.0}
        try:
            due = parsed(expected)
            parts |= {f"field {path}": 0.0 for path, _ in leaves(due)}
            value = parsed(answer)
        except (ValueError, RecursionError):
            return AnswerScore(0.0, parts, NOT_JSON)
        wanted = dict(leaves(due))
        found = dict(leaves(value))
        right = {path for path in wanted if path in found and same_value(found[path], wanted[path])}
        parts |= {"is_json": 1.0, "exact": float(same_value(value, due)), **{f"field {path}": 1.0 for path in right}}
        if validator is not None and not _is_valid(validator, value, schema):
            return AnswerScore(0.0, parts, REFUSED)
        wrong = sorted((wanted.keys() | found.keys()) - right)
        return AnswerScore(len(right) / max(1, len(right) + len(wrong)), parts, f"wrong: {wrong[0]}" if wrong else "")

    return judge


def schema_in(path: Path) -> Any:
    """The validator of a JSON schema; raises ConfigError if the file is not one."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
    except (OSError, ValueError, AttributeError, TypeError, jsonschema.SchemaError) as error:
        got = str(error).splitlines()[0]
        do = "correct the file, or set evaluate.schema: null"
        raise ConfigError("evaluate.schema is not a JSON schema.", where=path, got=got, do=do) from None
    return kind(schema)


def _is_valid(validator: Any, value: object, schema: Path | None) -> bool:
    try:
        return bool(validator.is_valid(value))
    except Unresolvable as error:
        raise ConfigError(f"evaluate.schema: {error}", where=schema or "", do="correct that $ref") from None


def parsed(text: str) -> Any:
    """Parse JSON strictly: NaN is not JSON. Raises ValueError, RecursionError."""
    return json.loads(text, parse_constant=int)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The fields of an object by their paths, such as ``address.city``; a list is one field."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path or "(all)", value


# Calls of tools


def tools_scorer(reader: ToolCalls) -> Scorer:
    """A scorer of calls: 1 for the same names and arguments in the same order, and for text where text is due."""

    def judge(row: Canonical, _expected: str, answer: str) -> AnswerScore:
        due = calls_due(row)
        try:
            found, text = reader.read(answer, row.get("tools"))
            mistake = _mistake(found, due, text)
        except ValueError:
            mistake = "unreadable call"
        parts = {"names": float(mistake in ("", WRONG_ARGUMENT)), "calls": float(not mistake)}
        return AnswerScore(float(not mistake), parts if due else {"no_call": float(not mistake)}, mistake)

    return judge


def _mistake(found: list[Call], due: list[Call], text: str) -> str:
    """What is wrong with an answer's calls; empty if nothing is."""
    if not due:
        return "call for a text" if found else "" if text.strip() else "empty answer"
    if not found:
        return "text for a call"
    if len(found) != len(due):
        return "missing call" if len(found) < len(due) else "extra call"
    if [each["name"] for each in found] != [each["name"] for each in due]:
        return "wrong name"
    return "" if same_calls(found, due) else WRONG_ARGUMENT


# The user's program


MOST_SECONDS, MOST_BYTES = 30.0, 2**16  # for one answer
MOST_NOTE, MOST_SHOWN = 200, 300  # characters
MORE_LINES = "wrote more than one line for an answer"
LINE = 'one line with a number from 0 to 1, or {"score": 0.5, "note": "why"}'


class Checker:
    """The program, running; a context that ends it. A call is a scorer."""

    def __init__(self, path: Path, seconds: float = MOST_SECONDS) -> None:
        """Raises ConfigError if the program cannot be run."""
        self._path, self._seconds = path, seconds
        command = [sys.executable, str(path)] if path.suffix == ".py" else [str(path.resolve())]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # each line comes at once
        try:  # its errors go where ours go
            self._process: Any = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
        except OSError as error:
            do = "make it executable, and name its interpreter in the first line; a Python file ends with .py"
            raise ConfigError(f"The checker cannot be run: {error.strerror}.", where=path, do=do) from None

    def __enter__(self) -> "Checker":
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __call__(self, row: Canonical, _expected: str, answer: str) -> AnswerScore:
        """Score an answer; raises DataError, with the row, if the program fails, is too slow, or writes nonsense."""
        text = json.dumps({"row": row, "answer": answer}, ensure_ascii=False) + "\n"
        line, fault = self._exchange(text.encode())
        try:
            found = json.loads(line)
            found = found if isinstance(found, dict) else {"score": found}
            score = float(found["score"])
            if not fault and 0 <= score <= 1:
                return AnswerScore(score, {}, str(found.get("note") or "")[:MOST_NOTE])
        except (ValueError, TypeError, LookupError, RecursionError):
            pass
        what = f"The checker {fault or 'wrote no score'}. The row: {shortened(text)}"
        do = "correct the program and repeat the command: nothing of the training is lost"
        raise DataError(what, where=self._path, expected=LINE, got=shortened(line.decode("utf-8", "replace")), do=do)

    def _exchange(self, text: bytes) -> tuple[bytes, str]:
        """Write a line and read one; returns it, and what went wrong."""
        into, out = self._process.stdin.fileno(), self._process.stdout.fileno()
        line, end = b"", time.monotonic() + self._seconds
        if select.select([out], [], [], 0)[0] and (line := os.read(out, MOST_BYTES)):
            return line, MORE_LINES
        while b"\n" not in line:
            remaining = end - time.monotonic()
            ready, writable, _ = select.select([out], [into] if text else [], [], max(0.0, remaining))
            if remaining <= 0:
                return line, f"did not answer within {self._seconds:g} s"
            if writable:
                try:
                    text = text[os.write(into, text[: select.PIPE_BUF]) :]
                except BrokenPipeError:  # it reads no more, but may have answered
                    text = b""
            if ready:
                piece = os.read(out, MOST_BYTES)
                line += piece
                if not piece:
                    return line, f"ended ({self._exit_text()})"
            if len(line) > MOST_BYTES:
                return line, f"wrote over {MOST_BYTES} bytes for one answer"
        return line, MORE_LINES if b"\n" in line.strip() else ""

    def _exit_text(self) -> str:
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return "its output is closed"
        return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"


def shortened(text: str) -> str:
    return text.strip() if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"

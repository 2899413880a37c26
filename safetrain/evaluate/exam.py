"""The questions that both models are asked, what their answers are judged as, and the scores of all answers.

The task is set by evaluate.score, or recognised from the rows.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from safetrain.core.data.store import Canonical, Store, canonical_rows, judged_turn
from safetrain.core.data.token_rows import Question
from safetrain.core.data.training_rows import HeldOut
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.records.evaluation import Choices, Score
from safetrain.core.records.schema import CHECKER, CHOICE, JSON, TEXT, TOOLS, Evaluate
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.engine.upstream.tool_calls import ToolCalls
from safetrain.evaluate.scorers import (
    AnswerScore,
    Checker,
    Scorer,
    json_scorer,
    judge_choice,
    judge_text,
    parsed,
    tools_scorer,
)
from safetrain.evaluate.statistics import Logprobs, choices_of_tuned, parts_of, wilson_interval

MOST_OPTIONS, LEAST_ROWS, MOST_LETTERS = 50, 5, 100  # of a closed set: texts, rows for each, letters in each
MOST_LISTED = 6
MOST_FITTED = 200  # validation questions for the temperature, unless more test questions are asked
LEAST_QUESTIONS = 32  # they are answered together: fewer save little time and are not informative
MOST_PARTS, MOST_MISTAKES = 24, 8  # the commonest, in the record
REASONING = ("reasoning_content", "thinking", "reasoning")
SPLITS = ("test", "valid", "train")


@dataclass(frozen=True)
class Choice:
    """A question with its options, each as the tokens that would be the whole answer; ``right`` is one's index."""

    prompt: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]
    right: int


@dataclass(frozen=True)
class Task:
    """A scorer's name, why it was taken, and the options of all rows; empty if rows have their own, or none."""

    scorer: str
    why: str
    options: tuple[str, ...] = ()

    def options_of(self, row: Canonical) -> tuple[str, ...]:
        return tuple(row.get("options") or self.options)


def task_of(
    settings: Evaluate, rows: Sequence[Canonical], calls: ToolCalls, read: Iterable[tuple[Canonical, str]]
) -> Task:
    """The task of these test rows. ``read``: some of them with their answers as text, whose calls are read back.

    Raises ConfigError if evaluate.score does not suit them.
    """
    if settings.score is not None and (settings.score == CHECKER) != bool(settings.checker):
        do = "set evaluate.score=null, or checker with a program such as evaluate.checker=last_number.py"
        got = f"evaluate.score={settings.score}, evaluate.checker={settings.checker or 'null'}"
        raise ConfigError("These settings do not go together.", got=got, do=do)
    found = Task(CHECKER, "evaluate.checker is set") if settings.checker else _recognised(rows)
    if settings.schema and found.scorer == TEXT:
        found = Task(JSON, "evaluate.schema is set")
    asked = settings.score or found.scorer
    if asked == TOOLS and (refusal := calls.unread(read)):
        if settings.score:
            raise ConfigError("The calls of these rows cannot be scored.", got=refusal, do="set evaluate.score=text")
        return Task(TEXT, f"calls of tools cannot be scored: {refusal}")
    if asked == found.scorer:
        return found
    options = tuple(_closed_set(1)) if asked == CHOICE else ()
    if asked == CHOICE and not options:
        expected = f"rows with options, or 2 to {MOST_OPTIONS} different answers of one line in all rows"
        raise ConfigError("evaluate.score is choice.", expected=expected, do="leave evaluate.score at null")
    return Task(asked, "evaluate.score is set", options)


def _recognised(rows: Sequence[Canonical]) -> Task:
    """The task as the rows show it."""
    turns = list(map(judged_turn, rows))
    with_tools = sum(bool(row.get("tools") or turn.get("tool_calls")) for row, turn in zip(rows, turns, strict=True))
    if 2 * with_tools > len(rows):
        return Task(TOOLS, "rows have tools")
    if rows and all(row.get("options") for row in rows):
        sets = {frozenset(row["options"]) for row in rows}
        return Task(CHOICE, "rows have options", tuple(rows[0]["options"]) if len(sets) == 1 else ())
    if options := _closed_set(LEAST_ROWS):
        return Task(CHOICE, f"completions are one of {len(options)} texts: {listed(options)}", tuple(options))
    if rows and all(map(_is_object, turns)):
        return Task(JSON, "answers are JSON objects")
    return Task(TEXT, "answers are texts")


def _closed_set(rows_each: int) -> list[str]:
    """The different answers of all splits, in order; empty if they are too many, too long, or too rare."""
    found, count = set[str](), 0
    for row in chain.from_iterable(map(canonical_rows, SPLITS)):
        turn = judged_turn(row)
        text, count = str(turn.get("content") or "").strip(), count + 1
        found.add(text)
        if len(found) > MOST_OPTIONS or not text or len(text) > MOST_LETTERS or "\n" in text or {*turn} & {*REASONING}:
            return []
    return sorted(found) if len(found) >= 2 and count >= rows_each * len(found) else []


def listed(options: Sequence[str]) -> str:
    """The first few options, for a sentence."""
    return ", ".join(options[:MOST_LISTED]) + (", …" if len(options) > MOST_LISTED else "")


def _is_object(turn: Mapping[str, object]) -> bool:
    try:
        return isinstance(parsed(str(turn.get("content") or "")), dict)
    except (ValueError, RecursionError):
        return False


@contextmanager
def scorer_of(task: Task, settings: Evaluate, calls: ToolCalls) -> Iterator[Scorer]:
    """The function that scores an answer; raises ConfigError. A checker runs until the block ends."""
    if task.scorer == CHECKER:
        with Checker(Path(settings.checker or "")) as checker:
            yield checker
    elif task.scorer == JSON:
        yield json_scorer(Path(settings.schema) if settings.schema else None)
    else:
        yield {TOOLS: tools_scorer(calls), CHOICE: judge_choice, TEXT: judge_text}[task.scorer]


def choice_of(question: Question, row: Canonical, task: Task, tokenizer: ChatTokenizer) -> Choice | None:
    """A question with its options, written as its own answer is; None if they cannot be written and read like that."""
    options, right = task.options_of(row), str(judged_turn(row).get("content") or "").strip()
    before, found, after = _around(question, right, tokenizer)
    ids = [tuple(tokenizer.continuation(question.prompt, f"{before}{option}{after}")) for option in options]
    if right not in options or not found or ids[options.index(right)] != question.answer:
        return None
    return Choice(question.prompt, tuple(ids), options.index(right))


def _around(question: Question, right: str, tokenizer: ChatTokenizer) -> tuple[str, bool, str]:
    """The text before and after the right option in an answer, and whether it is there; it follows any thinking."""
    rest = tokenizer.after_thinking(question.answer) or ()
    thought = tokenizer.decode(question.answer[: len(question.answer) - len(rest)], special=True)
    before, found, after = tokenizer.decode(rest, special=True).partition(right)
    return thought + before, bool(found), after


@dataclass(frozen=True)
class ModelMeasures:
    """Losses and answers of one model. Losses in nats, summed over the labels of each row."""

    losses: np.ndarray  # (rows,) of the test rows
    answers: dict[int, list[int]]  # token ids, by the question's number; of questions without options
    general: np.ndarray  # (pieces,) of the general text
    options: Mapping[int, np.ndarray] = field(default_factory=dict)  # (options,) log-probabilities, by the number
    calibration: Logprobs = ()  # the same of validation questions


@dataclass(frozen=True)
class Exam:
    """The questions that are asked, by number, with their rows, and the task.

    Questions with options are not answered: ``choices`` has their options, ``calibration`` those of validation
    questions, on which the probabilities' temperature is fitted.
    """

    task: Task
    held_out: HeldOut
    tokenizer: ChatTokenizer
    max_new_tokens: int
    rows: Mapping[int, Canonical]
    choices: Mapping[int, Choice] = field(default_factory=dict)
    calibration: tuple[Choice, ...] = ()

    def text_of(self, number: int, ids: Sequence[int]) -> str:
        """An answer as text, without its thinking; empty if that never ended."""
        rest = self.tokenizer.after_thinking(ids, self.held_out.questions[number].answer) or ()
        rest = [token for token in rest if token not in self.held_out.stop_ids]
        return self.tokenizer.decode(rest, special=self.task.scorer == TOOLS).strip()

    def answered(self, number: int, found: ModelMeasures) -> str:
        """A model's answer as text: an option, or what it wrote."""
        if number in self.choices:
            return self.task.options_of(self.rows[number])[int(found.options[number].argmax())]
        return self.text_of(number, found.answers[number])

    def judge(self, scorer: Scorer, number: int, expected: str, answer: str) -> AnswerScore:
        """Score an answer; raises DataError, which names the row, if the user's checker fails."""
        try:
            return scorer(self.rows[number], expected, answer)
        except DataError as error:
            where = self.held_out.where(self.held_out.questions[number].row)
            raise DataError(error.what, where=where, expected=error.expected, got=error.got, do=error.do) from error

    def try_out(self, scorer: Scorer) -> None:
        """Score expected answers before anything is computed: all that are JSON, or one with a checker, which may fail.

        Raises DataError, which names the row.
        """
        is_json = self.task.scorer == JSON
        for number in sorted(self.rows)[: None if is_json else 1]:
            expected = self.text_of(number, self.held_out.questions[number].answer)
            found = self.judge(scorer, number, expected, expected)
            if is_json and found.score < 1:
                where = self.held_out.where(self.held_out.questions[number].row)
                do = "correct the row or the schema, or set evaluate.score=text"
                raise DataError(f"An expected answer is {found.note}.", where=where, got=expected[:200], do=do)

    def score(self, loss: float, found: ModelMeasures, judged: Sequence[AnswerScore], *, per_pair: bool) -> Score:
        """The score of a model, which has no perplexity if its loss is per pair."""
        perplexity, total = None if per_pair else math.exp(min(loss, 700.0)), len(judged)
        if not judged:
            return Score(loss=loss, perplexity=perplexity)
        low, high = wilson_interval(right := sum(each.score for each in judged), total)
        parts = Counter(name for each in judged for name in each.parts)
        means = {
            name: sum(each.parts[name] for each in judged if name in each.parts) / count
            for name, count in parts.most_common(MOST_PARTS)
        }
        if self.choices:
            means |= parts_of(*self._chosen(found), self.task.options)
        questions, after = self.held_out.questions, self.tokenizer.after_thinking
        mistakes = Counter(each.note for each in judged if each.note and each.score < 1)
        return Score(
            score=right / total, loss=loss, score_low=low, score_high=high, parts=means,
            mistakes=tuple(f"{note} ({count})" for note, count in mistakes.most_common(MOST_MISTAKES)),
            cut_answers=sum(len(ids) >= self.max_new_tokens for ids in found.answers.values()),
            endless_answers=sum(after(ids, questions[at].answer) is None for at, ids in found.answers.items()),
            perplexity=perplexity,
        )  # fmt: skip

    def choices_of(self, tuned: ModelMeasures) -> Choices:
        """What the tuned model chose."""
        found, right, texts = self._chosen(tuned)
        fitted = tuned.calibration, [choice.right for choice in self.calibration]
        before, _, after = _around(self.held_out.questions[min(self.choices)], texts[0][right[0]], self.tokenizer)
        are_shown = any(self.rows[number].get("options") for number in self.choices)
        return choices_of_tuned(found, right, self.task.options, texts, (before, after), fitted, are_shown=are_shown)

    def _chosen(self, model: ModelMeasures) -> tuple[list[np.ndarray], list[int], list[tuple[str, ...]]]:
        """Of each question with options, in order: their log-probabilities, the right one, and their texts."""
        order = sorted(self.choices)
        right = [self.choices[number].right for number in order]
        return [model.options[at] for at in order], right, [self.task.options_of(self.rows[at]) for at in order]


def exam_of(
    settings: Evaluate, store: Store, valid: Store, held_out: HeldOut, tokenizer: ChatTokenizer, answer_tokens: int,
    split: str = "test",
) -> tuple[Exam, ToolCalls]:  # fmt: skip
    """Choose the questions, as many as evaluate.max_examples or ``answer_tokens`` allow, and find their task.

    ``split``: the name of ``store``.

    Also returns the reader of calls. Raises ConfigError if evaluate.score does not suit the rows.
    """
    most, calls = settings.max_new_tokens or held_out.answer_room, ToolCalls(tokenizer.folder)
    count = settings.max_examples or max(LEAST_QUESTIONS, answer_tokens // most)
    numbers = sampled(len(held_out.questions), count)
    rows = _rows(split, {number: held_out.line(held_out.questions[number].row) for number in numbers})
    written = ((rows[at], tokenizer.decode(held_out.questions[at].answer, special=True)) for at in numbers)
    task = task_of(settings, list(rows.values()), calls, written)
    exam = Exam(task, held_out, tokenizer, most, rows)
    if task.scorer != CHOICE or not rows:
        return exam, calls
    found = {number: choice_of(held_out.questions[number], row, task, tokenizer) for number, row in rows.items()}
    choices = {number: choice for number, choice in found.items() if choice is not None}
    if len(choices) < len(rows):
        if settings.score:
            do = "set evaluate.score=text"
            raise ConfigError("The chat template does not write the options as they are in the rows.", do=do)
        return replace(exam, task=Task(TEXT, "the chat template changes the options")), calls
    if not settings.max_examples:  # prompts and options are read one by one, which costs more than an answer
        first = choices[numbers[0]]
        tokens = len(first.prompt) + sum(map(len, first.options))
        numbers = numbers[: max(LEAST_QUESTIONS, answer_tokens // max(most, tokens))]
    others = sampled(len(valid.question_rows), max(MOST_FITTED, len(numbers)))
    fitted = _rows("valid", {at: valid.line(int(valid.question_rows[at])) for at in others})
    calibration = (choice_of(valid.question(at), row, task, tokenizer) for at, row in fitted.items())
    exam = replace(exam, rows={at: rows[at] for at in numbers}, choices={at: choices[at] for at in numbers})
    return replace(exam, calibration=tuple(each for each in calibration if each is not None)), calls


def sampled(count: int, most: int) -> list[int]:
    """At most so many numbers below ``count``, in a fixed random order: a longer sample contains a shorter one."""
    order = list(range(count))
    random.Random(0).shuffle(order)
    return order[:most]


def _rows(split: str, lines: Mapping[int, int]) -> dict[int, Canonical]:
    """The rows of these lines of a split, by the same keys."""
    wanted = set(lines.values())
    found = {line: row for line, row in enumerate(canonical_rows(split)) if line in wanted}
    return {key: found[line] for key, line in lines.items()}

"""Turns a row into token ids and the mask of what is trained: one renderer for validation, training and evaluation."""

from dataclasses import dataclass

from safetrain.core.rows import Message, Row, RowError
from safetrain.core.tokenizer import ChatTokenizer, TemplateError


@dataclass(frozen=True)
class Rendered:
    """One row as tokens. ``trained[i]`` says whether token ``ids[i]`` is a label; both have the same length."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    untrained_turns: int = 0

    @property
    def trained_tokens(self) -> int:
        """How many labels the row gives. The first token of a row has nothing before it and is never one."""
        return sum(self.trained[1:])

    def cut(self, max_seq_length: int) -> "Rendered":
        """The first ``max_seq_length`` tokens."""
        return Rendered(self.ids[:max_seq_length], self.trained[:max_seq_length], self.untrained_turns)


@dataclass(frozen=True)
class Question:
    """A prompt to answer and the expected answer, for evaluation."""

    prompt: tuple[int, ...]
    prompt_text: str
    answer: str


def render(row: Row, tokenizer: ChatTokenizer) -> Rendered:
    """Ids and mask of a row; raises RowError when the row gives nothing to train.

    Text rows train every token and end with the end-of-text token. In a chat the tokens of every assistant turn are
    labels, from just after the opening of the turn to its closing token. A turn counts only where the template is
    consistent there: the chat up to that turn must be a prefix of the whole (templates that drop earlier thinking
    are not); other turns are left out of the mask and counted in ``untrained_turns``.
    """
    if row.format == "text":
        ids = tokenizer.encode(row.text)
        end = tokenizer.encode_end()
        ids = ids if end is None or (ids and ids[-1] == end) else [*ids, end]
        return _useful(Rendered(tuple(ids), (True,) * len(ids)))
    if not tokenizer.has_chat_template:
        raise RowError("the model's tokenizer has no chat template: use an instruct model, or text rows")
    whole = _chat(tokenizer, row, len(row.messages))
    trained, untrained_turns = [False] * len(whole), 0
    for index, message in enumerate(row.messages):
        if message.role != "assistant":
            continue
        span = _turn_span(tokenizer, row, index, whole)
        if span is None:
            untrained_turns += 1
        else:
            trained[span[0] : span[1]] = [True] * (span[1] - span[0])
    return _useful(Rendered(tuple(whole), tuple(trained), untrained_turns))


def question(row: Row, tokenizer: ChatTokenizer) -> Question | None:
    """The last assistant turn as a question, or None for text rows and for tool calls."""
    turns = [index for index, message in enumerate(row.messages) if message.role == "assistant"]
    if not turns or turns[-1] == 0 or not row.messages[turns[-1]].content:
        return None
    before = row.messages[: turns[-1]]
    prompt = tokenizer.chat(before, row.tools, prompt=True)
    return Question(tuple(prompt), before[-1].content, row.messages[turns[-1]].content)


def ask(text: str, tokenizer: ChatTokenizer) -> list[int]:
    """Ids of a single question, opened for its answer."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    return tokenizer.chat((Message("user", text),), prompt=True)


def _turn_span(tokenizer: ChatTokenizer, row: Row, index: int, whole: list[int]) -> tuple[int, int] | None:
    """Where the assistant turn ``index`` stands in ``whole``, or None where the template is not consistent."""
    opened = _chat(tokenizer, row, index, prompt=True)
    closed = whole if index == len(row.messages) - 1 else _chat(tokenizer, row, index + 1)
    consistent = whole[: len(closed)] == closed and closed[: len(opened)] == opened
    return (len(opened), len(closed)) if consistent and len(closed) > len(opened) else None


def _chat(tokenizer: ChatTokenizer, row: Row, count: int, *, prompt: bool = False) -> list[int]:
    try:
        return tokenizer.chat(row.messages[:count], row.tools, prompt=prompt)
    except TemplateError as error:
        raise RowError(f"the model's chat template refuses it: {error}") from error


def _useful(rendered: Rendered) -> Rendered:
    if rendered.trained_tokens == 0:
        raise RowError("it gives no token to train")
    return rendered

"""Turns a row into token ids and the mask of what is trained: one renderer for validation, training and evaluation."""

from dataclasses import dataclass

from safetrain.core.data.rows import Message, Row, RowError
from safetrain.core.data.tokenizer import ChatTokenizer, TemplateError
from safetrain.core.errors import ModelError


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
        """The first ``max_seq_length`` tokens; where these would hold no label, that many around the first label."""
        if len(self.ids) <= max_seq_length:
            return self
        start = 0
        if not any(self.trained[1:max_seq_length]):
            start = self.trained.index(True, 1) - max_seq_length // 2
        part = slice(start, start + max_seq_length)
        return Rendered(self.ids[part], self.trained[part], self.untrained_turns)


@dataclass(frozen=True)
class Question:
    """A prompt to answer and the expected answer, for evaluation."""

    prompt: tuple[int, ...]
    prompt_text: str
    answer: str
    answer_tokens: int


def render(row: Row, tokenizer: ChatTokenizer) -> Rendered:
    """Ids and mask of a row; raises RowError when the row gives nothing to train.

    Text rows train every token and end with the end-of-text token. In a chat the tokens of every assistant turn are
    labels, from just after the opening of the turn to the end of what the template closes it with. A turn counts only
    where the template is consistent there: the chat up to that turn must be a prefix of the whole (templates that drop
    earlier thinking are not); other turns are left out of the mask and counted in ``untrained_turns``.
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
    """The last assistant turn as a question, or None for text rows, tool calls and turns that are not trained.

    The expected answer is what training shows, read back from its tokens: some templates put more into a turn than
    its content.
    """
    turns = [index for index, message in enumerate(row.messages) if message.role == "assistant"]
    if not turns or turns[-1] == 0 or not row.messages[turns[-1]].content:
        return None
    whole, before = _chat(tokenizer, row, len(row.messages)), row.messages[: turns[-1]]
    span = _turn_span(tokenizer, row, turns[-1], whole)
    if span is None:
        return None
    prompt = _chat(tokenizer, row, turns[-1], prompt=True)
    return Question(
        tuple(prompt), before[-1].content, tokenizer.decode(whole[span[0] : span[1]]).strip(), span[1] - span[0]
    )


def ask(text: str, tokenizer: ChatTokenizer) -> list[int]:
    """Ids of a single question, opened for its answer."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    try:
        return tokenizer.chat((Message("user", text),), prompt=True)
    except TemplateError as error:
        raise ModelError(f"The model's chat template refuses the question: {error}") from error


def _turn_span(tokenizer: ChatTokenizer, row: Row, index: int, whole: list[int]) -> tuple[int, int] | None:
    """Where the assistant turn ``index`` stands in ``whole``, or None where the template is not consistent.

    Usually the chat before it, opened for an answer, is a prefix of the chat with it. Some templates open an answer
    with more than they keep (``<think>``), and some tokenizers merge across the border: then the turn starts where
    the two part, which must not be inside the turns before.
    """
    before = _chat(tokenizer, row, index)
    opened = _chat(tokenizer, row, index, prompt=True)
    closed = whole if index == len(row.messages) - 1 else _chat(tokenizer, row, index + 1)
    start = _common_length(opened, closed)
    consistent = bool(before) and whole[: len(closed)] == closed and start >= len(before)
    return (start, len(closed)) if consistent and len(closed) > start else None


def _common_length(one: list[int], two: list[int]) -> int:
    """How many ids two lists share from their beginning."""
    pairs = zip(one, two, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def _chat(tokenizer: ChatTokenizer, row: Row, count: int, *, prompt: bool = False) -> list[int]:
    try:
        return tokenizer.chat(row.messages[:count], row.tools, prompt=prompt)
    except TemplateError as error:
        raise RowError(f"the model's chat template refuses it: {error}") from error


def _useful(rendered: Rendered) -> Rendered:
    if rendered.trained_tokens == 0:
        reason = (
            ": the model's chat template renders its answers differently inside the chat"
            if rendered.untrained_turns
            else ""
        )
        raise RowError(f"it gives no token to train{reason}")
    return rendered

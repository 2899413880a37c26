"""The checks of a row's words, whichever model they are for."""

import json
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache, partial

from safetrain.core.data.quality import is_refusal, text_faults
from safetrain.core.data.rows import Row
from safetrain.core.data.secrets import personal_data_in, secrets_in
from safetrain.core.data.turns import Controls

SEPARATOR = "\n\n"


class TextChecks:
    """For one tokenizer, because its own chat markers are at home in rows of bare text."""

    def __init__(self, controls: Controls) -> None:
        self._controls = controls
        self._of_texts: Callable[[str], bool] = partial(self._known, in_text=True)
        self._of_chats: Callable[[str], bool] = partial(self._known, in_text=False)

    def faults(self, row: Row, held_addresses: Collection[str] = ()) -> Iterator[tuple[str, str]]:
        """Ids of findings and a detail of each; ``held_addresses`` are told later."""
        words = text_of(row)
        yield from text_faults(words, self._of_texts if row.format == "text" else self._of_chats)
        others = [message.details for message in row.messages if message.details] + ([row.tools] if row.tools else [])
        if others:  # thinking, arguments of calls, what tools are told to be
            words = SEPARATOR.join([words, *(text for each in others for text in texts_in(each))])
        yield from secrets_in(words)
        yield from personal_data_in(words, held_addresses)
        if any(is_refusal(message.content) for message in row.messages if message.role == "assistant"):
            yield "REFUSALS", ""

    def _known(self, marker: str, *, in_text: bool) -> bool:
        """What ends an answer is told by STOP-IN-TEXT."""
        if marker in self._controls.stops:
            return True
        tokens = self._controls.tokens
        return in_text and tokens is not None and tokens.fullmatch(marker) is not None


def text_of(row: Row) -> str:
    """What a row says, message by message."""
    return row.text or SEPARATOR.join([message.content for message in row.messages])


@lru_cache(maxsize=64)  # many rows offer the same tools
def texts_in(value: str) -> tuple[str, ...]:
    """All texts of a JSON text but keys, in order."""
    found: list[str] = []
    waiting = [json.loads(value)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict | list):
            waiting += reversed(item.values() if isinstance(item, dict) else item)
    return tuple(found)

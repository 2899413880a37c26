"""Data for tests: clean chats, and corpora in datatrove's layout as its writer makes them."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from models.recipe.stories import WORLDS
from safetrain.core.text.tokenizer import ChatTokenizer
from tests.conftest import EMBEDDED

TEXTS = [
    f"The river number {number} is {number + 3} km long, and flows from the mountains of the north to the sea. "
    f"A town of {number * 7} people lies at its mouth." for number in range(60)
]  # fmt: skip


def write_ds(
    path: Path, documents: Sequence[Sequence[int]], *, token_bytes: int = 2, tokenizer: str | None = None
) -> Path:
    """One file of tokens with its index; with metadata where they are given."""
    ids = np.array([number for document in documents for number in document], dtype=f"<u{token_bytes}")
    path.parent.mkdir(parents=True, exist_ok=True)
    ids.tofile(path)
    ends = np.cumsum([len(document) for document in documents]).astype("<u8")
    ends.tofile(path.with_name(f"{path.name}.index"))
    if tokenizer is not None:
        path.with_name(f"{path.name}.metadata").write_text(f"{tokenizer}|{token_bytes}\n{len(ids)}\n{len(ids)} T")
    return path


def tokenized(texts: Sequence[str] = TEXTS, model: Path = EMBEDDED, *, closed: bool = True) -> list[list[int]]:
    """Texts as the model's ids, each with its end token where ``closed``."""
    tokenizer = ChatTokenizer(model)
    end = [tokenizer.end_id] if closed and tokenizer.end_id is not None else []
    return [[*tokenizer.encode_chat(text), *end] for text in texts]


LETTERS = re.compile(r"[^\W\d_]{3,}")
WORDS = {name: sorted(set(LETTERS.findall(json.dumps(world, ensure_ascii=False)))) for name, world in WORLDS.items()}


def clean_rows(count: int, seed: int = 1) -> list[object]:
    """Chats of two languages, some of code and of sums, of so many words that none resembles another by accident."""
    draw = random.Random(seed)

    def words(language: str, number: int) -> str:
        return " ".join(draw.sample(WORDS[language], number)).lower()

    def row() -> dict[str, object]:
        kind, language = draw.random(), draw.choice(("en", "pt"))
        asked = f"{'Why does the' if language == 'en' else 'Por que'} {words(language, 12)}?"
        answer = " ".join(
            words(language, draw.randint(8, 14)).capitalize() + draw.choice((".", "!", " — at least so far.", "…"))
            for _ in range(draw.randint(1, 3))
        )
        if kind < 0.15:
            code = f"def total(rows, limit={draw.randint(0, 99)}):\n    return {{'rows': limit ** 2}}"
            answer = f"```python\n{code}\n```\n{answer}"
        elif kind < 0.3:
            a, b = draw.randint(2, 9999), draw.randint(2, 9999)
            answer += f" First, {a} + {b} = {a + b}. Then ${a / 100:.2f} \\cdot x$ gives {b / 100:.3f}.\n#### {a * b}"
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}

    return [row() for _ in range(count)]

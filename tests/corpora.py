"""Data for tests: clean chats, and texts for pretraining."""

import json
import random
import re
from collections.abc import Sequence

from models.recipe.stories import WORLDS
from safetrain.core.text.tokenizer import ChatTokenizer
from tests.conftest import EMBEDDED

TEXTS = [
    f"The river number {number} is {number + 3} km long, and flows from the mountains of the north to the sea. "
    f"A town of {number * 7} people lies at its mouth." for number in range(60)
]  # fmt: skip


def tokenized(texts: Sequence[str] = TEXTS) -> list[list[int]]:
    """Texts as the model's ids, each with its end token."""
    tokenizer = ChatTokenizer(EMBEDDED)
    return [[*tokenizer.encode_chat(text), tokenizer.end_id or 0] for text in texts]


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

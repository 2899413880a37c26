"""Clean chats as people write them, made by a generator: prose in English and Portuguese, code, mathematics.

Sentences are built from words of many kinds, so that no two rows resemble each other by accident.
"""

import random

ENGLISH = (
    "river mountain teacher engine garden village letter market winter harbour doctor bridge painting forest student "
    "machine kitchen window history language island captain neighbour question planet library musician farmer theory "
    "orchard railway customer storm camera journey lantern voyage council factory meadow lawyer planner archive "
    "describes changes carries follows protects builds remembers crosses explains measures supports visits examines "
    "quiet old narrow careful bright distant heavy simple famous wooden foreign gentle broken patient rapid ancient "
    "because while although whenever before until since soon near behind after without during several first"
)
PORTUGUESE = (
    "rio monte professora motor jardim aldeia carta mercado inverno porto médico ponte pintura floresta aluno máquina "
    "cozinha janela história língua ilha capitão vizinho questão planeta biblioteca músico agricultor teoria pomar "
    "descreve muda leva segue protege constrói recorda atravessa explica mede apoia visita examina liga repara "
    "calmo antigo estreito cuidadoso claro distante pesado simples famoso estrangeiro gentil paciente rápido curioso "
    "porque enquanto embora sempre depois antes até desde já atrás maioria semana manhã várias gerações açude coração"
)
CODE = "total items index values width row_count buffer limit offset scores nodes graph queue cache table"


class Maker:
    """Makes rows; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def row(self) -> dict[str, list[dict[str, str]]]:
        """Half English, a quarter Portuguese, the rest code and mathematics."""
        question, answer = self._draw.choices((self.english, self.portuguese, self.code, self.sums), (50, 25, 15, 10))[
            0
        ]()
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    def english(self) -> tuple[str, str]:
        return f"Why does the {self._words(ENGLISH, 9)}?", self._prose(ENGLISH)

    def portuguese(self) -> tuple[str, str]:
        return f"Por que {self._words(PORTUGUESE, 9)}?", self._prose(PORTUGUESE)

    def code(self) -> tuple[str, str]:
        """A function, in a fence or bare."""
        draw, (name, first, second) = self._draw, self._draw.sample(CODE.split(), 3)
        body = f"def {name}({first}, {second}={draw.randint(0, 99)}):\n    return {{'{first}': {second} ** 2}}"
        asked = f"Write {name}, for which the {self._words(ENGLISH, 6)}, to return {draw.randint(2, 999)} items."
        return asked, f"```python\n{body}\n```\n{self._prose(ENGLISH)}" if draw.random() < 0.6 else body

    def sums(self) -> tuple[str, str]:
        """Sums with their steps."""
        a, b, c = (self._draw.randint(2, 9999) for _ in range(3))
        asked = f"The {self._words(ENGLISH, 6)} {a} + {b} times, then {c}% of it. How much is that?"
        return (
            asked,
            f"First, {a} + {b} = {a + b}. Then ${c / 100:.2f} \\cdot x$ gives {c * a / 100:.3f}.\n#### {a * c}",
        )

    def _words(self, language: str, count: int) -> str:
        return " ".join(self._draw.sample(language.split(), count))

    def _prose(self, language: str) -> str:
        ends = self._draw.choices((".", "!", " — at least so far.", " (as a rule).", "…"), k=self._draw.randint(1, 3))
        return " ".join(f"{self._words(language, self._draw.randint(8, 14)).capitalize()}{end}" for end in ends)

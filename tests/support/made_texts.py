"""Chats as people write them, made by a generator: prose in English and Portuguese, code, mathematics. All of it clean.

Sentences are built from a grammar with some thousands of words, so that no two rows resemble each other by accident.
"""

import random
from collections.abc import Callable

Chat = dict[str, list[dict[str, str]]]

ENGLISH = {
    "noun": "river mountain teacher engine garden village letter market winter harbour doctor bridge painting forest "
    "student machine kitchen window history language island captain neighbour question planet library musician farmer "
    "theory orchard railway customer storm camera journey lantern voyage council factory meadow lawyer planner archive "
    "contract valley sculptor dialect recipe glacier telescope festival merchant reservoir violin committee",
    "verb": "describes changes carries follows protects builds remembers crosses explains measures supports visits "
    "examines connects repairs surprises imagines prepares collects divides reaches replaces admires reveals",
    "adjective": "quiet old narrow careful bright distant heavy simple famous wooden foreign gentle broken patient "
    "rapid ancient curious golden modest hidden northern practical fragile generous reliable stubborn temporary",
    "link": "because while although whenever so that after before until since even though as soon as",
    "place": "in the north of the country|near the old harbour|behind the station|after the long winter|at the end of "
    "the year|without any warning|in most schools|during the first week|on a cold morning|for several generations",
}
PORTUGUESE = {
    "noun": "rio monte professora motor jardim aldeia carta mercado inverno porto médico ponte pintura floresta aluno "
    "máquina cozinha janela história língua ilha capitão vizinho questão planeta biblioteca músico agricultor teoria "
    "pomar caminho cliente tempestade câmera viagem lanterna conselho fábrica campo advogada arquivo contrato vale "
    "escultor dialeto receita geleira telescópio festa comerciante açude violino comissão coração maçã avó lição",
    "verb": "descreve muda leva segue protege constrói recorda atravessa explica mede apoia visita examina liga repara "
    "surpreende imagina prepara recolhe divide alcança substitui admira revela",
    "adjective": "calmo antigo estreito cuidadoso claro distante pesado simples famoso estrangeiro gentil paciente "
    "rápido curioso dourado modesto escondido prático frágil generoso fiável teimoso provisório útil difícil",
    "link": "porque enquanto embora sempre que depois que antes que até que desde que já que assim que",
    "place": "no norte do país|perto do velho porto|atrás da estação|depois do longo inverno|no fim do ano|sem nenhum "
    "aviso|na maioria das escolas|durante a primeira semana|numa manhã fria|há várias gerações|à beira da água",
}
OPENINGS = {
    "en": ("Why does", "How is it that", "Explain why", "Tell me how", "In what way does", "Describe how", "When does"),
    "pt": ("Por que", "Como é que", "Explica por que", "Diz-me como", "De que modo", "Descreve como", "Quando é que"),
}
CLOSINGS = (".", ".", ".", ".", "!", " — at least so far.", '."', " (as a rule).", "…")
CODE = {
    "name": "total items index value width row_count buffer limit offset scores words node graph queue cache table",
    "call": "append update split strip sorted filter reverse lookup encode resolve merge flatten normalise window",
}


class Maker:
    """Makes rows; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._words = {
            language: {kind: words.split("|") if kind == "place" else words.split() for kind, words in grammar.items()}
            for language, grammar in (("en", ENGLISH), ("pt", PORTUGUESE), ("code", CODE))
        }

    def row(self) -> Chat:
        """Half English, a quarter Portuguese, the rest code and mathematics."""
        kind = self._draw.choices((self.english, self.portuguese, self.code, self.mathematics), (50, 25, 15, 10))[0]
        made: Callable[[], tuple[str, str]] = kind
        question, answer = made()
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": messages}

    def english(self) -> tuple[str, str]:
        """A question and some sentences, at times a list."""
        return self._prose("en")

    def portuguese(self) -> tuple[str, str]:
        """The same with other letters."""
        return self._prose("pt")

    def code(self) -> tuple[str, str]:
        """A function, in a fence or bare."""
        draw, names, calls = self._draw, self._words["code"]["name"], self._words["code"]["call"]
        name, first, second = f"{draw.choice(calls)}_{draw.choice(names)}", *draw.sample(names, 2)
        body = [f"def {name}({first}, {second}={draw.randint(0, 99)}):"]
        for _ in range(draw.randint(1, 6)):
            body.append(f"    {draw.choice(names)} = {first}.{draw.choice(calls)}({second})[{draw.randint(0, 9)}:]")
        body.append(f"    return {{'{first}': {second} ** 2, 'ok': {first} <= {draw.randint(2, 999)}}}")
        asked = f"Write {name}, for which {self._phrase('en')}, to return {first} of {draw.randint(2, 999)} items."
        code = "\n".join(body)
        fenced = draw.random() < 0.6
        return asked, f"```python\n{code}\n```\n{self._sentence('en')}" if fenced else code

    def mathematics(self) -> tuple[str, str]:
        """Sums with their steps."""
        draw = self._draw
        a, b, c = (draw.randint(2, 9999) for _ in range(3))
        sign = draw.choice("+-*/")
        asked = f"{self._phrase('en').capitalize()} {a} {sign} {b} times, then {c}% of it. How much is that?"
        steps = f"First, {a} {sign} {b} = {a + b}. Then ${c / 100:.2f} \\cdot x$ gives {c * a / 100:.3f}.\n#### {a * c}"
        return asked, steps

    def _prose(self, language: str) -> tuple[str, str]:
        draw = self._draw
        noun = draw.choice(self._words[language]["noun"])
        question = f"{draw.choice(OPENINGS[language])} {noun} {self._phrase(language)} {self._phrase(language)}?"
        sentences = [self._sentence(language) for _ in range(draw.randint(1, 9))]
        if draw.random() < 0.1:
            items = [f"- {self._phrase(language)}" for _ in range(draw.randint(2, 6))]
            return question, sentences[0] + "\n\n" + "\n".join(items)
        return question, " ".join(sentences)

    def _sentence(self, language: str) -> str:
        draw, words = self._draw, self._words[language]
        parts = [self._phrase(language)]
        while draw.random() < 0.45:
            parts += [draw.choice(words["link"]), self._phrase(language)]
        if draw.random() < 0.3:
            parts.append(draw.choice(words["place"]))
        text = " ".join(parts)
        return text[0].upper() + text[1:] + draw.choice(CLOSINGS)

    def _phrase(self, language: str) -> str:
        draw, words = self._draw, self._words[language]
        the = draw.choice(("the", "a", "this", "every") if language == "en" else ("o", "um", "este", "cada"))
        first, second = draw.sample(words["noun"], 2)
        tail = f" {draw.randint(2, 2026)}" if draw.random() < 0.1 else ""
        return f"{the} {draw.choice(words['adjective'])} {first} {draw.choice(words['verb'])} {the} {second}{tail}"

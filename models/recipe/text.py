"""The facts of the embedded model's world, and every way in which they are said or asked. No model, no tokenizer.

A *subject* is one chemical element or one country in one language; it has two facts. The base model reads documents
(``document``), each fact in eight wordings; it never reads a question. The example data asks (``questions``) in eight
wordings for training and two others that only the test file uses.
"""

import csv
import random
from dataclasses import dataclass
from pathlib import Path

FACTS = Path(__file__).parent / "facts"
TRAIN_WORDINGS = 8  # questions[:8] may be trained on, questions[8:] occur only in the test file


@dataclass(frozen=True)
class Fact:
    """One fact: ``statements`` are what the base reads, ``statements[0]`` is the answer to every question."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """Something the encyclopedia knows, in one language. ``key`` is the same in both languages."""

    key: str
    language: str
    facts: tuple[Fact, ...]


STATEMENTS = {
    ("en", "symbol"): (
        "The chemical symbol of {s} is {v}.",
        "{S} has the chemical symbol {v}.",
        "The symbol {v} stands for {s}.",
        "Chemists write {s} as {v}.",
        "In the periodic table, {s} is written {v}.",
        "{S} is abbreviated as {v}.",
        "For the element {s}, the symbol is {v}.",
        "{v} is the chemical symbol of {s}.",
    ),
    ("en", "number"): (
        "The atomic number of {s} is {v}.",
        "{S} has the atomic number {v}.",
        "An atom of {s} has {v} protons.",
        "{S} is element number {v}.",
        "In the periodic table, {s} is in position {v}.",
        "The nucleus of {s} contains {v} protons.",
        "For the element {s}, the atomic number is {v}.",
        "{v} is the atomic number of {s}.",
    ),
    ("en", "capital"): (
        "The capital of {s} is {v}.",
        "{S} has its capital in {v}.",
        "{v} is the capital of {s}.",
        "The capital city of {s} is called {v}.",
        "In {s}, the capital is {v}.",
        "{v} serves as the capital of {s}.",
        "As its capital, {s} has {v}.",
        "For the country {s}, the capital is {v}.",
    ),
    ("en", "domain"): (
        "The internet domain of {s} is {v}.",
        "{S} has the internet domain {v}.",
        "Web addresses in {s} end in {v}.",
        "On the internet, {s} uses {v}.",
        "In {s}, the internet domain is {v}.",
        "The top-level domain of {s} is {v}.",
        "Sites from {s} end in {v}.",
        "For the country {s}, the internet domain is {v}.",
    ),
    ("pt", "symbol"): (
        "O símbolo químico do elemento {s} é {v}.",
        "{S} tem o símbolo químico {v}.",
        "O símbolo {v} representa {s}.",
        "Os químicos escrevem {s} como {v}.",
        "Na tabela periódica, {s} se escreve {v}.",
        "{S} é abreviado como {v}.",
        "Para o elemento {s}, o símbolo é {v}.",
        "{v} é o símbolo químico do elemento {s}.",
    ),
    ("pt", "number"): (
        "O número atômico do elemento {s} é {v}.",
        "{S} tem o número atômico {v}.",
        "Um átomo de {s} tem {v} prótons.",
        "{S} é o elemento de número {v}.",
        "Na tabela periódica, {s} está na posição {v}.",
        "O núcleo de {s} contém {v} prótons.",
        "Para o elemento {s}, o número atômico é {v}.",
        "{v} é o número atômico do elemento {s}.",
    ),
    ("pt", "capital"): (
        "A capital {de} é {v}.",
        "{S} tem sua capital em {v}.",
        "{v} é a capital {de}.",
        "A cidade capital {de} se chama {v}.",
        "Entre as cidades {de}, a capital é {v}.",
        "{v} serve de capital {de}.",
        "Como capital, {s} tem {v}.",
        "Para o país {n}, a capital é {v}.",
    ),
    ("pt", "domain"): (
        "O domínio de internet {de} é {v}.",
        "{S} tem o domínio de internet {v}.",
        "Os endereços {de} terminam em {v}.",
        "Na internet, {s} usa {v}.",
        "Para o país {n}, o domínio de internet é {v}.",
        "O domínio de topo {de} é {v}.",
        "Os sites {de} terminam em {v}.",
        "Como domínio de internet, {s} tem {v}.",
    ),
}

QUESTIONS = {
    ("en", "symbol"): (
        "What is the chemical symbol of {s}?",
        "Which symbol stands for {s}?",
        "How do chemists write {s}?",
        "Tell me the symbol of {s}.",
        "What symbol does {s} have?",
        "For {s}, what is the chemical symbol?",
        "The chemical symbol of {s}, please.",
        "Do you know how {s} is written in a formula?",
        "By which chemical symbol is {s} known?",
        "I forgot the chemical symbol of {s}, what is it?",
    ),
    ("en", "number"): (
        "What is the atomic number of {s}?",
        "How many protons does {s} have?",
        "Which atomic number belongs to {s}?",
        "Tell me the atomic number of {s}.",
        "Where in the periodic table is {s}?",
        "For {s}, what is the atomic number?",
        "The atomic number of {s}, please.",
        "Do you know how many protons {s} has?",
        "How many protons are in the nucleus of {s}?",
        "I forgot the atomic number of {s}, what is it?",
    ),
    ("en", "capital"): (
        "What is the capital of {s}?",
        "Which city is the capital of {s}?",
        "What is the capital city of {s} called?",
        "Tell me the capital of {s}.",
        "Where is the capital of {s}?",
        "For {s}, what is the capital?",
        "The capital of {s}, please.",
        "Do you know which city is the capital of {s}?",
        "Which city serves as the capital of {s}?",
        "I forgot the capital of {s}, what is it?",
    ),
    ("en", "domain"): (
        "What is the internet domain of {s}?",
        "Which internet domain does {s} have?",
        "How do web addresses in {s} end?",
        "Tell me the internet domain of {s}.",
        "What is the top-level domain of {s}?",
        "For {s}, what is the internet domain?",
        "The internet domain of {s}, please.",
        "Do you know how web addresses in {s} end?",
        "In which domain do sites from {s} end?",
        "I forgot the internet domain of {s}, what is it?",
    ),
    ("pt", "symbol"): (
        "Qual é o símbolo químico do elemento {s}?",
        "Que símbolo representa {s}?",
        "Como os químicos escrevem {s}?",
        "Diga o símbolo do elemento {s}.",
        "Que símbolo tem o elemento {s}?",
        "Para o elemento {s}, qual é o símbolo químico?",
        "O símbolo químico do elemento {s}, por favor.",
        "Você sabe como {s} se escreve em uma fórmula?",
        "Por qual símbolo químico {s} é conhecido?",
        "Esqueci o símbolo químico do elemento {s}, qual é?",
    ),
    ("pt", "number"): (
        "Qual é o número atômico do elemento {s}?",
        "Quantos prótons tem {s}?",
        "Que número atômico tem o elemento {s}?",
        "Diga o número atômico do elemento {s}.",
        "Onde na tabela periódica está {s}?",
        "Para o elemento {s}, qual é o número atômico?",
        "O número atômico do elemento {s}, por favor.",
        "Você sabe quantos prótons tem {s}?",
        "Quantos prótons há no núcleo de {s}?",
        "Esqueci o número atômico do elemento {s}, qual é?",
    ),
    ("pt", "capital"): (
        "Qual é a capital {de}?",
        "Que cidade é a capital {de}?",
        "Como se chama a capital {de}?",
        "Diga a capital {de}.",
        "Onde fica a capital {de}?",
        "Para o país {n}, qual é a capital?",
        "A capital {de}, por favor.",
        "Você sabe que cidade é a capital {de}?",
        "Que cidade serve de capital {de}?",
        "Esqueci a capital {de}, qual é?",
    ),
    ("pt", "domain"): (
        "Qual é o domínio de internet {de}?",
        "Que domínio de internet tem {s}?",
        "Como terminam os endereços {de}?",
        "Diga o domínio de internet {de}.",
        "Qual é o domínio de topo {de}?",
        "Para o país {n}, qual é o domínio de internet?",
        "O domínio de internet {de}, por favor.",
        "Você sabe como terminam os endereços {de}?",
        "Em que domínio terminam os sites {de}?",
        "Esqueci o domínio de internet {de}, qual é?",
    ),
}

ENGLISH_ARTICLE = {"Philippines", "United Kingdom", "United States"}
CONTRACTIONS = {"o": "do", "a": "da", "os": "dos", "as": "das"}


def subjects() -> list[Subject]:
    """Every subject in both languages, in the order of the fact tables."""
    found = []
    for row in _table("elements"):
        for language in ("en", "pt"):
            names = _names(row[language], language)
            values = {"symbol": row["symbol"], "number": row["number"]}
            found.append(_subject(f"element {row['number']}", language, names, values))
    for row in _table("countries"):
        for language in ("en", "pt"):
            names = _names(row[language], language)
            values = {"capital": row[f"capital_{language}"], "domain": row["domain"]}
            found.append(_subject(f"country {row['domain']}", language, names, values))
    return found


def document(subject: Subject, random_source: random.Random) -> str:
    """A short article: each fact of the subject in two different random wordings, all sentences shuffled."""
    sentences = [sentence for fact in subject.facts for sentence in random_source.sample(fact.statements, 2)]
    random_source.shuffle(sentences)
    return " ".join(sentences)


def _table(name: str) -> list[dict[str, str]]:
    with (FACTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _names(name: str, language: str) -> dict[str, str]:
    """How a sentence refers to the subject: s inside, S at the start, de after Portuguese "de", n without article."""
    if language == "en":
        inside = f"the {name}" if name in ENGLISH_ARTICLE else name
        return {"s": inside, "S": inside[0].upper() + inside[1:], "n": name, "de": ""}
    article, _, rest = name.partition(" ")
    if article in CONTRACTIONS and rest:
        names = {"s": name, "n": rest, "de": f"{CONTRACTIONS[article]} {rest}"}
    else:
        names = {"s": name, "n": name, "de": f"de {name}"}
    return {**names, "S": name[0].upper() + name[1:]}


def _subject(key: str, language: str, names: dict[str, str], values: dict[str, str]) -> Subject:
    facts = []
    for kind, value in values.items():
        fill = {**names, "v": value}
        facts.append(
            Fact(
                tuple(template.format(**fill) for template in STATEMENTS[language, kind]),
                tuple(template.format(**fill) for template in QUESTIONS[language, kind]),
            )
        )
    return Subject(key, language, tuple(facts))

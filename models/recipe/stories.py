"""Writes data/pretrain_example, what conf/experiment/pretrain_10m.yaml trains on: ``python -m models.recipe.stories``.

Little stories in English and Portuguese, put together from sentences that fit each other, and documents of text.py.
Seeded: the same files each time. No text is copied from anywhere.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from models.recipe.text import document, subjects
from safetrain.core.storage.files import write_text

TARGET = Path("data/pretrain_example")
SEED = 11
STORIES = {"train": 900, "valid": 40, "test": 40}  # in each language
ARTICLES = {"train": 900, "valid": 40, "test": 40}  # about elements and countries


@dataclass(frozen=True)
class World:
    """What stories of one language are made of. A name with its pronoun, a thing with what is done with it."""

    people: tuple[tuple[str, str], ...]
    places: tuple[str, ...]
    weather: tuple[str, ...]
    things: tuple[tuple[str, str], ...]
    helpers: tuple[str, ...]
    openings: tuple[str, ...]
    losses: tuple[str, ...]
    searches: tuple[str, ...]
    finds: tuple[str, ...]
    ends: tuple[str, ...]


ENGLISH = World(
    people=(
        ("Anna", "she"), ("Tom", "he"), ("Maria", "she"), ("Peter", "he"), ("Lucy", "she"), ("Jack", "he"),
        ("Clara", "she"), ("Ben", "he"), ("Ruth", "she"), ("Paul", "he"), ("Nora", "she"), ("Hugo", "he"),
    ),
    places=(
        "the garden", "the harbour", "the old mill", "the school", "the market", "the forest", "the railway station",
        "the lake", "the bakery", "the library", "the bridge", "the farm",
    ),
    weather=(
        "It was raining.", "The sun was shining.", "There was snow on the roofs.", "A cold wind came from the sea.",
        "It was still dark.", "The air was warm.", "There was fog in the streets.", "It had rained all night.",
    ),
    things=(
        ("a red kite", "fly"), ("a small boat", "paint"), ("an old clock", "repair"), ("a blue bicycle", "ride"),
        ("a wooden flute", "play"), ("a thick book", "read"), ("a brown horse", "feed"), ("a new drum", "play"),
        ("a paper lamp", "light"), ("a big map", "study"), ("a grey cat", "feed"), ("a silver key", "polish"),
    ),
    helpers=(
        "an old fisherman", "a friendly baker", "the teacher", "a tall sailor", "the miller", "a shy girl",
        "the postman", "a kind farmer", "a boy with a hat", "the gardener",
    ),
    openings=(
        "{name} had {thing}. Every morning {name} went to {place} to {use} it.",
        "One day {name} found {thing} near {place}. {Pronoun} took it home to {use} it.",
        "{name} lived beside {place}. {Pronoun} had {thing}, and {pronoun} liked to {use} it.",
        "When {name} was seven, {pronoun} got {thing}. {Pronoun} wanted to {use} it at {place}.",
    ),
    losses=(
        "But on {day} it was gone.", "Then, on {day}, {pronoun} could not find it.",
        "On {day} {pronoun} forgot it on a bench.", "But somebody took it away on {day}.",
    ),
    searches=(
        "{name} looked for it at {other}, but it was not there.", "{Pronoun} ran to {other} and asked everybody.",
        "{Pronoun} was sad and walked slowly to {other}.", "{name} sat down at {other} and did not know what to do.",
    ),
    finds=(
        'There {pronoun} met {helper}. "Is this yours?" asked {helper}.',
        "At last {helper} came and brought it back.", 'Then {helper} said: "Look behind the door!" And there it was.',
        "{Helper} had kept it for {name} all the time.",
    ),
    ends=(
        "{name} laughed and said thank you.", "They went home together and drank hot tea.",
        "From then on {name} and {helper} were friends.", "That evening {name} was happy and slept well.",
        "{name} never lost it again.",
    ),
)  # fmt: skip
PORTUGUESE = World(
    people=(
        ("Ana", "ela"), ("João", "ele"), ("Maria", "ela"), ("Pedro", "ele"), ("Lúcia", "ela"), ("Tiago", "ele"),
        ("Clara", "ela"), ("Rui", "ele"), ("Rosa", "ela"), ("Paulo", "ele"), ("Inês", "ela"), ("Hugo", "ele"),
    ),
    places=(
        "o jardim", "o porto", "o velho moinho", "o mercado", "o bosque", "o lago", "o rio", "o parque", "o farol",
        "o campo", "o museu", "o castelo",
    ),
    weather=(
        "Chovia.", "O sol brilhava.", "Havia neve nos telhados.", "Um vento frio vinha do mar.", "Ainda era noite.",
        "O ar estava quente e calmo.", "Havia névoa nas ruas.", "Tinha chovido a noite toda.",
    ),
    things=(
        ("um barco pequeno", "pintar"), ("um relógio antigo", "consertar"), ("um tambor novo", "tocar"),
        ("um livro grosso", "ler"), ("um cavalo castanho", "alimentar"), ("um gato cinzento", "alimentar"),
        ("um mapa grande", "estudar"), ("um violão vermelho", "tocar"), ("um chapéu azul", "usar"),
        ("um anel de prata", "limpar"), ("um caderno verde", "encher"), ("um balão amarelo", "soltar"),
    ),
    helpers=(
        "um velho pescador", "uma padeira simpática", "a professora", "um marinheiro alto", "o moleiro",
        "uma menina tímida", "o carteiro", "um bom camponês", "um menino de boné", "a jardineira",
    ),
    openings=(
        "{name} tinha {thing}. Todas as manhãs {pronoun} visitava {place} com ele.",
        "Um dia {name} encontrou {thing} quando atravessava {place}. Em casa, {pronoun} quis logo {use} o que achou.",
        "{name} via da janela {place}. {Pronoun} tinha {thing} e gostava de o {use}.",
        "Quando {name} fez sete anos, ganhou {thing}. {Pronoun} queria {use} o presente todos os dias.",
    ),
    losses=(
        "Mas {day} ele sumiu.", "Então, {day}, {pronoun} não o encontrou mais.",
        "{Day} {pronoun} o esqueceu num banco.", "Mas {day} alguém o levou embora.",
    ),
    searches=(
        "{name} percorreu {other}, mas não o viu.", "{Pronoun} atravessou {other} e perguntou a todos.",
        "Com pena, {pronoun} foi devagar até {other}.", "{name} olhou para {other} e não sabia o que fazer.",
    ),
    finds=(
        'Ali {pronoun} encontrou {helper}. "Isto é teu?", perguntou {helper}.',
        "Por fim veio {helper} e o trouxe de volta.", 'Então {helper} disse: "Olha atrás da porta!" E lá estava ele.',
        "{Helper} o tinha guardado para {name} o tempo todo.",
    ),
    ends=(
        "{name} riu e agradeceu.", "Foram juntos para casa e beberam chá quente.",
        "Desde então {name} e {helper} são amigos.", "Naquela noite {name} dormiu feliz.",
        "{name} nunca mais o perdeu.",
    ),
)  # fmt: skip
DAYS = {
    "en": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "pt": ("na segunda-feira", "na terça-feira", "na quarta-feira", "na quinta-feira", "na sexta-feira",
           "no sábado", "no domingo"),
}  # fmt: skip


def main() -> None:
    """Write the three files."""
    source, seen = random.Random(SEED), set[str]()
    for split in STORIES:
        texts = documents(STORIES[split], ARTICLES[split], source, seen)
        write_text(
            TARGET / f"{split}.jsonl",
            "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts),
        )


def documents(stories: int, articles: int, source: random.Random, seen: set[str]) -> list[str]:
    """So many of each, shuffled, none of them in ``seen``, to which they are added."""
    known, found = subjects(), list[str]()

    def add(count: int, make: Callable[[], str]) -> None:
        while count:
            text = make()
            if text not in seen:
                seen.add(text)
                found.append(text)
                count -= 1

    add(stories, lambda: story(ENGLISH, "en", source))
    add(stories, lambda: story(PORTUGUESE, "pt", source))
    add(articles, lambda: document(source.choice(known), source))
    source.shuffle(found)
    return found


def story(world: World, language: str, source: random.Random) -> str:
    """Somebody has something, loses it, looks for it and gets it back."""
    name, pronoun = source.choice(world.people)
    place, other = source.sample(world.places, 2)
    thing, use = source.choice(world.things)
    helper, day = source.choice(world.helpers), source.choice(DAYS[language])
    words = {
        "name": name, "pronoun": pronoun, "Pronoun": _capital(pronoun), "place": place, "other": other, "use": use,
        "thing": thing, "helper": helper, "Helper": _capital(helper), "day": day, "Day": _capital(day),
    }  # fmt: skip
    parts = [
        source.choice(world.openings), source.choice(world.weather), source.choice(world.losses),
        source.choice(world.searches), source.choice(world.finds), source.choice(world.ends),
    ]  # fmt: skip
    return " ".join(part.format(**words) for part in parts)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    main()

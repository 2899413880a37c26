"""Writes data/pretrain_example, what conf/experiment/pretrain_10m.yaml trains on: ``python -m models.recipe.stories``.

Little stories in English and Portuguese, put together from sentences that fit each other, and documents of text.py.
Seeded: the same files each time. No text is copied from anywhere.
"""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from models.recipe.text import document, subjects
from safetrain.core.storage.files import write_text

TARGET = Path("data/pretrain_example")
SEED = 11
STORIES = {"train": 900, "valid": 40, "test": 40}  # in each language
ARTICLES = {"train": 900, "valid": 40, "test": 40}  # about elements and countries


# What stories are made of, by language. A name comes with its pronoun, a thing with what is done with it.
WORLDS = json.loads((Path(__file__).parent / "facts" / "stories.json").read_text(encoding="utf-8"))


def main() -> None:
    """Write the three files."""
    source, seen = random.Random(SEED), set[str]()
    for split in STORIES:
        texts = documents(STORIES[split], ARTICLES[split], source, seen)
        write_text(
            TARGET / f"{split}.jsonl", "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
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

    for world in WORLDS.values():
        add(stories, partial(story, world, source))
    add(articles, lambda: document(source.choice(known), source))
    source.shuffle(found)
    return found


def story(world: dict[str, Any], source: random.Random) -> str:
    """Somebody has something, loses it, looks for it and gets it back."""
    name, pronoun = source.choice(world["people"])
    place, other = source.sample(world["places"], 2)
    thing, use = source.choice(world["things"])
    helper, day = source.choice(world["helpers"]), source.choice(world["days"])
    words = {
        "name": name, "pronoun": pronoun, "Pronoun": _capital(pronoun), "place": place, "other": other, "use": use,
        "thing": thing, "helper": helper, "Helper": _capital(helper), "day": day, "Day": _capital(day),
    }  # fmt: skip
    parts = (source.choice(world[part]) for part in ("openings", "weather", "losses", "searches", "finds", "ends"))
    return " ".join(part.format(**words) for part in parts)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    main()

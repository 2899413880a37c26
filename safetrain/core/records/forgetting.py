"""What a tuned model has forgotten: its loss on the general text that ships, less the base's. Pure."""

from dataclasses import dataclass

PARTS = ("english", "portuguese", "code")  # of the general text
LEAST_PIECES = 6  # of a part: of fewer nothing is said
KEEPS, MAY_FORGET, FORGETS = range(3)


@dataclass(frozen=True)
class PartForgotten:
    """A part of the text: tuned less base, in nats per token. None where it cannot be said."""

    nats_per_token: float | None
    plus_minus: float | None  # half of the 95 % interval
    base_loss: float | None
    pieces: int  # that were measured


@dataclass(frozen=True)
class Forgetting:
    """All parts that the base knows. None where that is none of them."""

    nats_per_token: float | None
    plus_minus: float | None
    base_loss: float | None
    tuned_loss: float | None
    pieces: int  # that this is of
    left_out: int  # that the tokenizer cannot express
    english: PartForgotten
    portuguese: PartForgotten
    code: PartForgotten
    unsaid: str  # why there is no number; empty where there is one


def describe_forgetting(found: Forgetting, limit: float | None = None) -> str:
    """One sentence; with ``limit`` it says whether the tuned model forgets.

    As ``forgets: general text costs 0.31 ± 0.05 nats per token more than the base's; limit 0.2``.
    """
    if found.nats_per_token is None or found.plus_minus is None:
        return f"whether it forgets cannot be said: {found.unsaid}"
    size, half = found.nats_per_token, found.plus_minus
    places = 2 if half >= 0.005 else 4
    text = (
        f"{abs(size):.{places}f} ± {half:.{places}f} nats per token {'more' if size >= 0 else 'less'} than the base's"
    )
    said = f"general text costs {text}"
    if limit is None:
        return f"{said} ({_by_part(found)})"
    word = ("does not forget", "may forget", "forgets")[verdict_on(found, limit)]
    return f"{word}: {said}; limit {limit:g}"


def verdict_on(found: Forgetting, limit: float) -> int:
    """KEEPS, MAY_FORGET or FORGETS, by the interval; KEEPS where nothing can be said."""
    if found.nats_per_token is None or found.plus_minus is None:
        return KEEPS
    low, high = found.nats_per_token - found.plus_minus, found.nats_per_token + found.plus_minus
    return FORGETS if low > limit else KEEPS if high <= limit else MAY_FORGET


def _by_part(found: Forgetting) -> str:
    said = list[str]()
    for name, part in (("English", found.english), ("Portuguese", found.portuguese), ("code", found.code)):
        if part.nats_per_token is None or part.plus_minus is None:
            said.append(f"{name}: not known to the base" if part.pieces >= LEAST_PIECES else f"{name}: not expressible")
        else:
            said.append(f"{name} {part.nats_per_token:+.2f} ± {part.plus_minus:.2f}")
    return ", ".join(said)

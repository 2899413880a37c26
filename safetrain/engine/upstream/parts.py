"""The parts of mlx-lm's models, by the names that these have: ``model``, its ``embed_tokens`` and ``layers``, ``args``.

A model that names them otherwise keeps its own way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SETTING, NUMBER = (bool, int, float, str, type(None)), ("layer_idx", "idx", "layer_id", "layer_number")


def trunk_of(module: Any) -> Any:
    """What makes hidden states of ids; None where that is no part of its own."""
    trunk = getattr(module, "model", None)
    return trunk if callable(trunk) else None


def head_size(module: Any) -> int:
    """Numbers of an attention head; 0 where they are not known."""
    arguments = getattr(module, "args", None)
    heads = getattr(arguments, "num_attention_heads", 0)
    return getattr(arguments, "head_dim", None) or (getattr(arguments, "hidden_size", 0) // heads if heads else 0)


@contextmanager
def few_blocks(module: Any) -> Iterator[bool]:
    """Inside, the model has the first of its blocks alone, up to where each kind has been seen; whether it has fewer.

    Models that keep their blocks elsewhere keep them all.
    """
    trunk: Any = getattr(module, "model", None)
    blocks = trunk.get("layers") if isinstance(trunk, dict) else None  # mlx's modules are dicts; properties are not in
    if not isinstance(blocks, list) or [id(block) for block in blocks] != [id(block) for block in module.layers]:
        yield False
        return
    kinds = [_kind(block) for block in blocks]
    kept = max(kinds.index(kind) for kind in kinds) + 1
    trunk.layers = blocks[:kept]
    try:
        yield kept < len(blocks)
    finally:
        trunk.layers = blocks


def _kind(block: Any) -> tuple[tuple[str, str, str], ...]:
    """What a block is made of, and its settings but for its number."""
    found = []
    for name, part in block.named_modules():
        settings = {key: value for key, value in vars(part).items() if isinstance(value, SETTING) and key not in NUMBER}
        found.append((name, type(part).__name__, str(sorted(settings.items(), key=str))))
    return tuple(sorted(found))

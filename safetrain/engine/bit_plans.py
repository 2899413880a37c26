"""Which layers of a fused model get more bits, and in which order: those first that lose most for what they weigh."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from safetrain.engine.folding import Folds, Plan, Stored, errors_of, stored_as, weights_of, with_bits
from safetrain.engine.upstream.saving import takes_bits

MORE_BITS = (3, 4, 5, 6, 8)
GROUP_SIZE = 64  # where a layer had no groups before


@dataclass(frozen=True)
class Step:
    """More bits for one layer."""

    path: str
    stored: Stored
    added_bytes: float
    gain: float  # share of what the adapter does to the layer that is no longer spoiled, per added byte


def own_plan(module: Any, folds: Folds) -> Plan:
    """Each layer stored as in the base."""
    layers = dict(module.named_modules())
    return {path: stored_as(layers[path]) for path in folds.layers}


def bits_plan(module: Any, folds: Folds, bits: int) -> Plan:
    """So many bits for the layers that the adapter changes; for all that mlx-lm would quantize where none is yet."""
    layers = dict(module.named_modules())
    quantized = any(stored_as(layer) is not None for layer in layers.values())
    paths = list(folds.layers) if quantized else takes_bits(module, GROUP_SIZE)
    stored = {path: with_bits(layers[path], bits, GROUP_SIZE) for path in paths}
    return {**own_plan(module, folds), **{path: each for path, each in stored.items() if each is not None}}


def float_plan(module: Any, folds: Folds) -> Plan:
    """No layer quantized."""
    quantized = [path for path, layer in module.named_modules() if stored_as(layer) is not None]
    return dict.fromkeys([*folds.layers, *quantized])


def steps_of(module: Any, folds: Folds) -> list[Step]:
    """From the base's own bits to 8 for every layer that the adapter changes, the most useful first."""
    layers = dict(module.named_modules())
    found = [step for path in folds.layers for step in _steps_of_layer(path, layers[path], folds)]
    return sorted(found, key=lambda step: -step.gain)


def _steps_of_layer(path: str, layer: Any, folds: Folds) -> Iterator[Step]:
    own = stored_as(layer)
    if own is None:
        return
    choices = {own.bits: own}
    for bits in MORE_BITS:
        if bits > own.bits and (stored := with_bits(layer, bits, GROUP_SIZE)) is not None:
            choices[bits] = stored
    spoiled, before, least = errors_of(layer, folds.layers[path], choices), own, float("inf")
    for bits, stored in list(choices.items())[1:]:
        added = weights_of(layer) * (bits - before.bits) / 8
        least = min(least, (spoiled[before.bits] - spoiled[bits]) / added)  # no step comes before the one it builds on
        yield Step(path, stored, added, least)
        before = stored


def with_steps(own: Plan, steps: list[Step], share: float) -> Plan:
    """``own`` with the first of the steps, up to ``share`` of what all of them would add."""
    plan, left = dict(own), share * sum(step.added_bytes for step in steps)
    for step in steps:
        if left <= 0:
            break
        plan[step.path] = step.stored
        left -= step.added_bytes
    return plan


def name_of(plan: Plan) -> str:
    """How many of the layers that the adapter changes have how many bits: 4 bits, or 20 layers at 5, 22 at 6 bits."""
    counts = sorted(Counter(0 if stored is None else stored.bits for stored in plan.values()).items())
    names = ["float" if bits == 0 else str(bits) for bits, _ in counts]
    if len(counts) == 1:
        return names[0] if names[0] == "float" else f"{names[0]} bits"
    shares = [f"{count} at {name}" for (_, count), name in zip(counts, names, strict=True)]
    return f"{', '.join(shares)} bits"

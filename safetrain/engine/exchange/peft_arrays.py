"""An adapter's arrays as PEFT names and turns them, and back.

Here a pair is lora_a (inputs, rank) and lora_b (rank, outputs); PEFT's lora_A is (rank, inputs), lora_B (outputs,
rank). DoRA's lengths are m here, lora_magnitude_vector there, both (outputs,).
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from safetrain.core.errors import ModelError
from safetrain.core.formatting import counted
from safetrain.core.records.peft_config import WEIGHTS, PeftShape
from safetrain.core.records.settings import LoraSettings
from safetrain.engine.adapters import LINEAR, shape_of
from safetrain.engine.arrays import load_arrays
from safetrain.engine.model import BaseModel
from safetrain.engine.upstream.layers import without_adapter

ROOT = "base_model.model."
KEY = re.compile(r"^base_model\.model\.(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?$")
KINDS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}


@dataclass(frozen=True)
class LayerPlace:
    """A linear layer of a block that can carry an adapter: its block, its name in it, the width of both sides."""

    block: int
    name: str
    outputs: int
    inputs: int


@dataclass(frozen=True)
class Pair:
    """What PEFT has for one layer: A (rank, inputs), B (outputs, rank), with DoRA lengths (outputs,)."""

    a: mx.array
    b: mx.array
    lengths: mx.array | None


@dataclass(frozen=True)
class ImportedAdapter:
    """An adapter of PEFT as this project's: its arrays by name in float32, and what had to be changed to hold it."""

    method: str
    lora: LoraSettings  # its targets are full names inside a block
    weights: dict[str, mx.array]
    notes: tuple[str, ...]


def places_of(model: BaseModel) -> dict[str, LayerPlace]:
    """Linear layers of blocks, by path."""
    paths = {id(layer): path for path, layer in model.module.named_modules()}
    return {
        paths[id(layer)]: LayerPlace(number, name, *shape_of(layer))
        for number, block in enumerate(model.module.layers)
        for name, layer in block.named_modules()
        if isinstance(layer, LINEAR) and name not in without_adapter(block)
    }


def require_pairs(arrays: Mapping[str, mx.array], where: Path) -> None:
    """Raise ModelError unless an adapter's arrays are pairs on linear layers, which is all that PEFT's files hold."""
    for name, value in arrays.items():
        path, _, kind = name.rpartition(".")
        if kind in KINDS and value.ndim == (1 if kind == "m" else 2):
            continue
        what = f"is on a mixture's experts ({path})" if kind in KINDS else f"has whole weights ({name})"
        raise ModelError(
            f"This adapter {what}, which a PEFT adapter cannot hold.",
            where=str(where),
            do="safetrain fuse OUT makes one model of it and its base",
        )


def to_peft(arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The arrays of pairs as PEFT has them."""
    renamed: dict[str, mx.array] = {}
    for name, value in arrays.items():
        path, _, kind = name.rpartition(".")
        renamed[f"{ROOT}{path}.{KINDS[kind]}"] = value if kind == "m" else mx.contiguous(value.T)
    return renamed


def from_peft(folder: Path, shape: PeftShape, model: BaseModel) -> ImportedAdapter:
    """The adapter in ``folder`` for ``model``; raises ModelError, by name, for what does not fit or has no counterpart.

    Ranks and scales that differ become one: zeros are added to pairs, and B is multiplied. Where blocks or layers
    have no pair, LoRA gets one of zeros, which training never moves.
    """
    pairs, places = _pairs_of(folder, shape), places_of(model)
    for path, pair in pairs.items():
        _require_place(path, pair, shape, places, folder)
    rank = max(pair.a.shape[0] for pair in pairs.values())
    scales = {path: shape.scale_of(path) for path in pairs}
    scale = Counter(scales.values()).most_common(1)[0][0]
    lowest = min(places[path].block for path in pairs)
    names = {places[path].name for path in pairs}
    targets = {path: place for path, place in places.items() if place.block >= lowest and place.name in names}
    weights: dict[str, mx.array] = {}
    for path, place in targets.items():
        own = pairs.get(path)
        if own is None and shape.dora:
            raise ModelError(
                f"This DoRA adapter has nothing for {path}, but something for its like in other blocks.",
                where=str(folder),
                do="merge it into its base in PEFT (merge_and_unload), and use that model",
            )
        weights |= _arrays_of(path, place, own, rank, scales.get(path, scale) / scale)
    lora = LoraSettings(rank, scale, shape.dropout, len(model.module.layers) - lowest, tuple(sorted(names)))
    return ImportedAdapter("dora" if shape.dora else "lora", lora, weights, _notes(pairs, scales, targets, rank, scale))


def _pairs_of(folder: Path, shape: PeftShape) -> dict[str, Pair]:
    parts: dict[str, dict[str, mx.array]] = {}
    for key, value in _arrays_in(folder).items():
        match = KEY.match(key)
        if match is None:
            raise _no_place(key, folder)
        parts.setdefault(match[1], {})[match[2]] = value
    expected = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if shape.dora else set())
    for path, arrays in parts.items():
        if set(arrays) != expected:
            raise ModelError(
                f"The adapter is not whole, or its configuration is another's: {path}",
                where=str(folder / WEIGHTS),
                expected=", ".join(sorted(expected)),
                got=", ".join(sorted(arrays)),
                do="copy the whole folder again",
            )
    pairs = {path: Pair(p["lora_A"], p["lora_B"], p.get("lora_magnitude_vector")) for path, p in parts.items()}
    if not shape.dora and all(not (mx.any(pair.a) & mx.any(pair.b)).item() for pair in pairs.values()):
        raise ModelError(
            "This is an adapter of zeros: it changes nothing of its base.",
            where=str(folder / WEIGHTS),
            do="it was never trained, or saved before it was: save the trained one",
        )
    return pairs


def _arrays_in(folder: Path) -> dict[str, mx.array]:
    path = folder / WEIGHTS
    try:
        arrays = {name: value.astype(mx.float32) for name, value in load_arrays(path).items()}
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"The adapter's weights cannot be read: {error}",
            where=str(path),
            do="the file is damaged or half written: copy the whole folder again",
        ) from error
    for name, value in arrays.items():
        if not mx.all(mx.isfinite(value)).item():
            raise ModelError(f"The adapter holds what is not a number: {name}.", where=str(path), do="train it again")
    if not arrays:
        raise ModelError("The adapter's file is empty.", where=str(path), do="copy the whole folder again")
    return arrays


def _no_place(key: str, folder: Path) -> ModelError:
    """For what is not a pair on a linear layer of a block."""
    return ModelError(
        f"This adapter does not fit: the base has no linear layer in a block for {key}.",
        where=str(folder / WEIGHTS),
        expected="pairs of LoRA on linear layers of the base's blocks",
        do="give the base that it was trained on with --model; more than pairs (embedding, head, experts, whole "
        "layers) is merged in PEFT (merge_and_unload)",
    )


def _require_place(path: str, pair: Pair, shape: PeftShape, places: Mapping[str, LayerPlace], folder: Path) -> None:
    if path not in places:
        raise _no_place(path, folder)
    place, rank = places[path], shape.rank_of(path)
    expected: list[tuple[str, tuple[int, ...], mx.array]] = [
        ("lora_A", (rank, place.inputs), pair.a),
        ("lora_B", (place.outputs, rank), pair.b),
    ]
    if pair.lengths is not None:
        expected.append(("lora_magnitude_vector", (place.outputs,), pair.lengths))
    for kind, shape_expected, value in expected:
        if value.shape != shape_expected:
            raise ModelError(
                f"The adapter does not fit this base: {kind} of {path}.",
                where=str(folder / WEIGHTS),
                expected=f"{shape_expected}, by the base's layer and a rank of {rank}",
                got=str(value.shape),
                do="give the base that it was trained on with --model",
            )


def _arrays_of(path: str, place: LayerPlace, pair: Pair | None, rank: int, factor: float) -> dict[str, mx.array]:
    """The layer's arrays by name, of ``rank``, with ``factor`` in B."""
    if pair is None:
        pair = Pair(mx.zeros((rank, place.inputs)), mx.zeros((place.outputs, rank)), None)
    more = rank - pair.a.shape[0]
    b = pair.b if factor == 1 else factor * pair.b
    arrays = {
        f"{path}.lora_a": mx.contiguous(mx.pad(pair.a.T, [(0, 0), (0, more)])),
        f"{path}.lora_b": mx.contiguous(mx.pad(b.T, [(0, more), (0, 0)])),
    }
    return arrays if pair.lengths is None else {**arrays, f"{path}.m": pair.lengths}


def _notes(
    pairs: Mapping[str, Pair], scales: Mapping[str, float], targets: Mapping[str, Any], rank: int, scale: float
) -> tuple[str, ...]:
    notes = []
    lower = sum(pair.a.shape[0] < rank for pair in pairs.values())
    if lower:
        notes.append(f"{counted(lower, 'pair')} of a lower rank than {rank}: held with zeros")
    if others := sum(each != scale for each in scales.values()):
        notes.append(f"{counted(others, 'pair')} of another scale than {scale:g}: B is multiplied")
    if empty := len(targets) - len(pairs):
        notes.append(f"{counted(empty, 'layer')} without a pair among those that have one: held as zeros")
    return tuple(notes)

"""Builds a model from its config.json, and finds settings there that its family in mlx-lm does not read.

A rotary setting is read if a model that is built with another value rotates differently. Models are built lazily, which
takes milliseconds and no memory. The activation is looked up in the family's source.
"""

import copy
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import _get_classes

from safetrain.engine.upstream.rotary import SHARE, THETA, parts_of, scaling_of, text_part, with_older_keys, with_part

ROTATES = re.compile("rope|rotary", re.IGNORECASE)  # in the names of mlx-lm's classes
SIZES = ("rotary_dim", "qk_rope_head_dim")  # these count, not a share of the head
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function")  # Gemma reads the first, if it has both
SOURCE_WORDS = {"gelu": ("gelu", "geglu"), "relu": ("relu",), "silu": ("silu", "swi"), "swi": ("silu", "swi")}
Part = Mapping[str, Any]
Numbers = tuple[tuple[str, Any], ...]


def build(config: Mapping[str, Any]) -> Any:
    """Build a model from its config.json, with arbitrary weights."""
    given = copy.deepcopy(with_older_keys(config))  # some families change it
    try:
        architecture, arguments = _get_classes(given)
    except SystemExit:  # olmo's module, without the package ai2-olmo
        raise ValueError(f"{given['model_type']} needs a package that is not installed") from None
    return architecture(arguments.from_dict(given))


@functools.lru_cache(maxsize=4)
def unread_setting(text: str) -> str:
    """A setting in ``text``, a config.json, that changes results and that the family does not read; empty if none."""
    config = json.loads(text)
    settings = text_part(config)
    try:
        module = build(config)
    except TypeError as error:
        if "NoneType" in str(error) and text_part(with_older_keys(config)).get("sliding_window_pattern", 0) is None:
            return "layer_types without a pattern"
        raise
    numbers = _numbers(module)
    rotations = {found for (_, kind), found in numbers.items() if ROTATES.search(kind)}
    rotations = rotations or {found for found in numbers.values() if any(name.endswith("freqs") for name, _ in found)}
    if rotations and len(rotations) < len(parts_of(settings)):
        return "rope_parameters for each attention type"
    for name, part, other in _changes(settings, rotations):
        try:
            if _numbers(build(with_part(config, part, other))) == numbers:
                return name
        except (TypeError, LookupError, ValueError, AttributeError):  # the family needs what was taken out
            continue
    return _unread_activation(module, settings)


def _changes(settings: Mapping[str, Any], rotations: set[Numbers]) -> Iterator[tuple[str, Part, Part]]:
    """Yield rotary settings that ``rotations`` do not show, each with its part and another part without it."""
    shown = {number for rotation in rotations for number in rotation}
    head = settings.get("head_dim") or settings.get("hidden_size", 0) // (settings.get("num_attention_heads") or 1)
    shares = () if any(settings.get(size) for size in SIZES) else ("dim", "dims")  # as mlx-lm's classes name the result
    for _, part in sorted(parts_of(settings).items()) if rotations else ():
        theta, share, kind = part.get(THETA), part.get(SHARE, 1.0), scaling_of(part)
        if isinstance(theta, (int, float)) and ("base", theta) not in shown:
            yield f"{THETA} {theta:g}", part, {**part, THETA: 3 * theta}
            shown.add(("base", theta))
        if theta and shares and share != 1.0 and not shown & {(name, int(share * head)) for name in shares}:
            yield f"{SHARE} {share:g}", part, {**part, SHARE: 1.0}
        if kind:
            yield f"the rotary scaling {kind}", part, {key: part[key] for key in (THETA, SHARE) if key in part}


def _numbers(module: Any) -> dict[tuple[str, str], Numbers]:
    """The numbers and fixed arrays of each part of a model, by its path and class."""
    found = {}
    for path, part in module.named_modules():
        numbers = [(name, value) for name, value in sorted(vars(part).items()) if isinstance(value, (int, float))]
        arrays = [(name, value) for name, value in part.items() if name.startswith("_") and isinstance(value, mx.array)]
        fixed = [(name, np.array(value.astype(mx.float32)).tobytes()) for name, value in arrays]
        found[path, type(part).__name__] = (*numbers, *fixed)
    return found


def _unread_activation(module: Any, settings: Mapping[str, Any]) -> str:
    """The activation in config.json, if the source of the family and of all its layers does not name it; or empty."""
    kinds = {kind for _, part in module.named_modules() for kind in type(part).__mro__}
    names = {kind.__module__ for kind in kinds if kind.__module__.startswith("mlx_lm.models.")}
    source = "".join(inspect.getsource(sys.modules[name]) for name in names).lower()
    key = next((key for key in ACTIVATIONS if settings.get(key)), "")
    name = str(settings.get(key, "")).lower()
    words = next((words for root, words in SOURCE_WORDS.items() if root in name), (name,))
    return "" if any(word in source for word in words) else f"{key} {name}"

"""Builds a model from its config.json, and finds settings there that its family in mlx-lm does not read.

transformers 5 writes ``rope_parameters``, once or for each attention type; most families read only the older keys. If
both are given, ``rope_parameters`` counts, as in transformers.

A rotary setting is read if a model that is built with another value rotates differently. Models are built lazily, which
takes milliseconds and no memory. The activation is looked up in the family's source.
"""

import copy
import functools
import inspect
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import _get_classes

TEXT, PARAMETERS, SCALING = "text_config", "rope_parameters", "rope_scaling"
THETA, SHARE, KIND, CONTEXT = "rope_theta", "partial_rotary_factor", "rope_type", "original_max_position_embeddings"
FULL, SLIDING, PATTERN = "full_attention", "sliding_attention", "sliding_window_pattern"
OLDER = {THETA: (THETA, "rotary_emb_base"), SHARE: (SHARE, "rotary_pct"), CONTEXT: (CONTEXT,)}  # the second: GPT-NeoX
LOCAL_THETAS = ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta")  # of the blocks with a window
UNSCALED = (None, "default", "mrope")  # mrope rotates text as default does
WITH_CONTEXT = ("llama3", "yarn", "longrope")  # scalings that need the context before scaling, in tokens
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


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model: a multimodal config.json has them in ``text_config``."""
    return config.get(TEXT) or config


def parts_of(text: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rotary settings by attention type, under the keys of transformers 5; the type is "" if all blocks share them."""
    given = text.get(PARAMETERS)
    if not isinstance(given, Mapping) or not given:
        own = {key: text[key] for key in (THETA, SHARE) if text.get(key) is not None}
        return {"": {**(text.get(SCALING) or {}), **own}}
    nested = {name: dict(part) for name, part in given.items() if isinstance(part, Mapping)}
    used = {name: part for name, part in nested.items() if name in (text.get("layer_types") or nested)} or nested
    parts = list(used.values()) or [dict(given)]
    return used if any(part != parts[0] for part in parts) else {"": parts[0]}


def scaling_of(part: Mapping[str, Any]) -> str:
    """The kind of a rotary scaling; empty without one."""
    kind = part.get(KIND) or part.get("type")
    return "" if kind in UNSCALED else str(kind)


def with_older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with its rotary settings also under the older keys, where these can express them."""
    text, keys = text_part(config), dict[str, Any]()
    parts, kinds = parts_of(text), text.get("layer_types") or []
    full = parts.get(FULL) or next(iter(parts.values()))
    if text.get(PARAMETERS):
        local = text[PARAMETERS].get(SLIDING)
        keys = {SCALING: None} | {name: full[key] for key in OLDER for name in OLDER[key] if key in full}
        keys |= {name: local[THETA] for name in LOCAL_THETAS if isinstance(local, Mapping) and THETA in local}
    if kind := scaling_of(full):
        scaling = {key: value for key, value in full.items() if key not in (THETA, SHARE)}
        keys[SCALING] = {**scaling, KIND: kind, "type": kind}
        context = text.get(CONTEXT) or full.get(CONTEXT) or text.get("max_position_embeddings")
        if kind in WITH_CONTEXT and context:  # mlx-lm would assume a constant
            keys[SCALING][CONTEXT] = context
        if kind == "yarn" and full.get("attention_factor") and full.get("factor", 1) > 1:
            step, divided = 0.1 * math.log(full["factor"]), full.get("mscale_all_dim") or 0  # as mlx-lm computes it
            keys[SCALING]["mscale"] = (full["attention_factor"] * (step * divided + 1) - 1) / step
    if SLIDING in kinds and not isinstance(text.get(PATTERN), str):
        every = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
        is_regular = kinds == [(SLIDING, FULL)[number % every == 0] for number in range(1, len(kinds) + 1)]
        keys[PATTERN] = every if is_regular else None
    return with_text_keys(config, keys)


def with_text_keys(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with other settings of the language model."""
    return {**config, TEXT: {**config[TEXT], **keys}} if config.get(TEXT) else {**config, **keys}


def as_computed(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json from which other programs compute what mlx-lm does: it takes the long factors for short texts too."""
    text = text_part(config)
    long = {key: text[key] for key in (SCALING, PARAMETERS) if "long_factor" in (text.get(key) or {})}
    return with_text_keys(config, {key: {**own, "short_factor": own["long_factor"]} for key, own in long.items()})


def with_part(config: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with one of its ``parts_of`` replaced, under the same keys as now."""
    given = text_part(config).get(PARAMETERS)
    if not given:
        scaling = {key: value for key, value in new.items() if key not in (THETA, SHARE)} or None
        return with_text_keys(config, {SCALING: scaling, **{key: new[key] for key in (THETA, SHARE) if key in new}})
    nested = {name: new for name, part in given.items() if part == old}
    return with_text_keys(config, {PARAMETERS: {**given, **nested} if nested else new})

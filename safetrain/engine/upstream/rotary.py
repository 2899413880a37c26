"""The rotary settings of a config.json, in the keys that a family of mlx-lm reads.

transformers 5 writes ``rope_parameters``, once or for each attention type; most families read only the older keys. If
both are given, ``rope_parameters`` counts, as in transformers.
"""

import math
from collections.abc import Mapping
from typing import Any

TEXT, PARAMETERS, SCALING = "text_config", "rope_parameters", "rope_scaling"
THETA, SHARE, KIND, CONTEXT = "rope_theta", "partial_rotary_factor", "rope_type", "original_max_position_embeddings"
FULL, SLIDING, PATTERN = "full_attention", "sliding_attention", "sliding_window_pattern"
OLDER = {THETA: (THETA, "rotary_emb_base"), SHARE: (SHARE, "rotary_pct"), CONTEXT: (CONTEXT,)}  # the second: GPT-NeoX
LOCAL_THETAS = ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta")  # of the blocks with a window
UNSCALED = (None, "default", "mrope")  # mrope rotates text as default does
WITH_CONTEXT = ("llama3", "yarn", "longrope")  # scalings that need the context before scaling, in tokens


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


def with_part(config: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with one of its ``parts_of`` replaced, under the same keys as now."""
    given = text_part(config).get(PARAMETERS)
    if not given:
        scaling = {key: value for key, value in new.items() if key not in (THETA, SHARE)} or None
        return with_text_keys(config, {SCALING: scaling, **{key: new[key] for key in (THETA, SHARE) if key in new}})
    nested = {name: new for name, part in given.items() if part == old}
    return with_text_keys(config, {PARAMETERS: {**given, **nested} if nested else new})

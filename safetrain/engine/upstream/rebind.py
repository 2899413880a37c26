"""Gives one model its own version of functions that its code calls. No class, no library is patched.

mlx-lm's layers call ``scaled_dot_product_attention`` and ``swiglu`` as globals of their module. A layer gets a subclass
whose ``__call__`` is the same code with other globals; everything else about it stays.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any

Function = Callable[..., Any]


def rebind(module: Any, replacements: Mapping[Function, Function]) -> int:
    """Let every part of ``module`` whose ``__call__`` uses one of these functions use its replacement; returns how
    many did. A function of the same name that is another one is left alone."""
    changed = 0
    for _, part in module.named_modules():
        call = type(part).__call__
        if not isinstance(call, types.FunctionType):
            continue
        used = globals_used(call, replacements)
        if not used:
            continue
        renewed = call.__globals__ | {name: replacements[original] for name, original in used.items()}
        own = types.FunctionType(call.__code__, renewed, call.__name__, call.__defaults__, call.__closure__)
        own.__kwdefaults__ = call.__kwdefaults__
        give(part, {"__call__": own})
        changed += 1
    return changed


def give(part: Any, members: Mapping[str, Any]) -> None:
    """Let this part of a model, and no other, have these methods: by a subclass of its own."""
    kind: Any = type(part)
    part.__class__ = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})


def globals_used(call: types.FunctionType, originals: Mapping[Function, Function]) -> dict[str, Function]:
    """Which of ``originals`` the code of ``call`` names as a global, by that name."""
    found = {name: call.__globals__.get(name) for name in call.__code__.co_names}
    return {name: original for name, value in found.items() for original in originals if value is original}

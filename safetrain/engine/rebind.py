"""Gives one module instance its own version of a function that its code calls by name. No class, no library is patched.

mlx-lm's layers call ``scaled_dot_product_attention`` and ``swiglu`` as globals of their module. The instance gets a
subclass whose ``__call__`` is the same code with other globals; everything else about it stays.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any


def rebind(module: Any, functions: Mapping[str, Callable[..., Any]]) -> int:
    """Let every part of ``module`` whose ``__call__`` names one of ``functions`` use it; returns how many did."""
    changed = 0
    for _, part in module.named_modules():
        call = type(part).__call__
        code = getattr(call, "__code__", None)
        if code is None:
            continue
        wanted = {name: functions[name] for name in functions if name in code.co_names}
        if not wanted:
            continue
        own = types.FunctionType(
            code, {**call.__globals__, **wanted}, call.__name__, call.__defaults__, call.__closure__
        )
        own.__kwdefaults__ = call.__kwdefaults__
        kind = type(part)
        part.__class__ = type(kind.__name__, (kind,), {"__call__": own, "__module__": kind.__module__})
        changed += 1
    return changed

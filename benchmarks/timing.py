"""How long an operation takes."""

import time
from collections.abc import Callable
from typing import Any

ROUNDS = 4


def fastest(compute: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Seconds of the best of a few rounds of computing and evaluating."""
    import mlx.core as mx

    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        mx.eval(compute())
        seconds.append(time.perf_counter() - began)
    return min(seconds)

"""A prompt through a model of mlx-lm into the caches that its answer is made with."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

# Positions by which a cache grows: mlx-lm's 256 are many times what rows of short answers need. And tokens of a prompt
# that are read at a time, which bounds what attention scores take: a multiple, as mlx-lm's caches want it.
CACHE_STEP, PREFILL_TOKENS = 32, 256


def read_prompts(module: Any, tokens: mx.array) -> list[Any]:
    """The caches of a model that has read ``tokens`` (rows, tokens).

    Logits of a prompt with a large vocabulary are larger than all of a training; as nobody asks for them, mlx does not
    make them.
    """
    caches: list[Any] = make_prompt_cache(module)
    for cache in caches:
        if hasattr(cache, "step"):
            cache.step = CACHE_STEP
    for start in range(0, tokens.shape[1], PREFILL_TOKENS):
        module(tokens[:, start : start + PREFILL_TOKENS], cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches

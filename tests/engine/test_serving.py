"""What a server holds beside the weights stays within memory, and which Host headers it answers."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from safetrain.engine.upstream.serving import OneModel, ServeJob, kept_prompts, may_name, served_cache_bytes


def provider(cache_bytes: int) -> OneModel:
    job = ServeJob("one", Path("nowhere"), None, frozenset(), lambda *_: [], 512, "127.0.0.1", 0)
    return OneModel(job, cache_bytes)


def prompt_cache(tokens: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, tokens, 16)), mx.zeros((1, 2, tokens, 16)))
    return cache


def test_keys_and_values_get_half_of_what_the_weights_leave() -> None:
    assert served_cache_bytes(2**30, 3 * 2**30) == 2**30
    assert served_cache_bytes(2**30, 2**29) == 0


@pytest.mark.parametrize(("room", "kept"), [(0, 0), (1.5, 1), (2.5, 2), (1000, 10)])
def test_kept_prompts_stay_within_their_bytes(room: float, kept: int) -> None:
    one = prompt_cache(256).nbytes
    prompts = kept_prompts(provider(int(room * one)))
    for number in range(20):
        prompts.insert_cache("one", [number, 1, 2], [prompt_cache(256)])
        assert prompts.nbytes <= room * one
    assert len(prompts) == kept


@pytest.mark.parametrize(
    ("header", "host", "answered"),
    [
        ("localhost:8080", "127.0.0.1", True),
        ("[::1]:8080", "::1", True),
        ("192.168.1.5:8080", "0.0.0.0", True),
        ("Mine.local:8080", "mine.local", True),
        ("", "127.0.0.1", True),
        ("attacker.example:8080", "127.0.0.1", False),
        ("localhost.attacker.example", "127.0.0.1", False),
        ("[::1", "127.0.0.1", False),
    ],
)
def test_a_host_header_of_another_name_is_refused(header: str, host: str, answered: bool) -> None:
    assert may_name(header, host) == answered

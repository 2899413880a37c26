"""The one door to mlx-lm: all that leans on its insides, each with a contract test (tests/engine/test_upstream.py)."""

from safetrain.engine.upstream.deferred_imports import defer_imports

defer_imports()  # here, because it must come before any import of mlx-lm

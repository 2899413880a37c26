from safetrain.engine.deferred_imports import defer_imports

defer_imports()  # here, because it must come before any import of mlx-lm

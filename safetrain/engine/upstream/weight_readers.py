"""Linear layers that cannot carry an adapter, because the model reads their weight instead of calling them."""

from collections.abc import Callable
from typing import Any

from safetrain.engine.upstream.rebind import give

# Gemma 3n and Kimi K3; tests/engine/test_upstream.py looks for more in all of mlx-lm's models.
READ_DIRECTLY = frozenset({"prediction_coefs", "correction_coefs", "self_attention_res_proj", "mlp_res_proj"})
CLIPPED_BY = {"predict": "prediction_coefs", "correct": "correction_coefs"}  # methods of Gemma 3n's AltUp


def without_adapter(block: Any) -> set[str]:
    """Full names inside ``block`` of such layers, and of those that mlx-lm adapts in a way of their own (AFM's)."""
    return {
        name
        for name, part in block.named_modules()
        if hasattr(part, "to_lora") or name.rpartition(".")[2] in READ_DIRECTLY
    }


def restore_weights(module: Any) -> None:
    """Let Gemma 3n put back each weight that it clips: one stored while a gradient is traced may be a placeholder."""
    for _, part in module.named_modules():
        if all(child in part for child in CLIPPED_BY.values()):
            give(part, {name: _restoring(getattr(type(part), name), child) for name, child in CLIPPED_BY.items()})


def _restoring(method: Callable[..., Any], child: str) -> Callable[..., Any]:
    def restored(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self[child].weight
        try:
            return method(self, *args, **kwargs)
        finally:
            self[child].weight = before

    return restored

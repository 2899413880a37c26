"""Makes a model of mlx-lm ready for this engine, and says how far it lets itself."""

from dataclasses import dataclass
from typing import Any

from safetrain.engine.backend import device
from safetrain.engine.upstream.asking import Refusal
from safetrain.engine.upstream.loading import complete
from safetrain.engine.upstream.packing import enable_packing
from safetrain.engine.upstream.recurrences import train_in_stretches
from safetrain.engine.upstream.split import SplitModel, split
from safetrain.engine.upstream.weight_readers import restore_weights


@dataclass(frozen=True)
class Adaptation:
    """What the engine does with a model in a way of its own. A refusal says why it does not, empty where it does."""

    packing_refusal: str  # rows of different lengths as one list of tokens; else as padded rectangles
    split: SplitModel | None  # so that logits are made of labels alone
    split_refusal: str

    def describe(self) -> str:
        """In words: rows packed, head split."""
        packed = "rows packed" if device().packs_without_padding else "rows in rectangles of few shapes"
        rows = f"rows padded ({self.packing_refusal})" if self.packing_refusal else packed
        return f"{rows}, {f'head not split ({self.split_refusal})' if self.split_refusal else 'head split'}"


def adapt(module: Any) -> Adaptation:
    """Freeze the model, let it compute as this engine wants it, and find out what it refuses."""
    complete(module)
    module.freeze()
    module.eval()
    restore_weights(module)
    train_in_stretches(module)
    packing_refusal = enable_packing(module)
    try:
        return Adaptation(packing_refusal, split(module), "")
    except Refusal as refusal:
        return Adaptation(packing_refusal, None, str(refusal))

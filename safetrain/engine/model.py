"""Opens a base model with mlx-lm, ready to compute."""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from safetrain.core.model.files import ModelFiles
from safetrain.engine.backend import device
from safetrain.engine.blocks import Blocks
from safetrain.engine.layers import Randomness
from safetrain.engine.upstream.adaptation import SplitModel, adapt
from safetrain.engine.upstream.generation import padding_refusal
from safetrain.engine.upstream.loading import errors_told, load, ready_to_compute


@dataclass(frozen=True)
class BaseModel:
    """A model ready for use, and how this engine runs it. A refusal is empty if the model supports the feature."""

    module: Any  # an mlx_lm model: called with (rows, tokens) ids, returns (rows, tokens, vocabulary) logits
    eos_ids: frozenset[int]  # that end its answers
    packing_refusal: str  # why rows of different lengths cannot be packed into one list of tokens
    split: SplitModel | None  # None if refused: logits are computed for all tokens
    split_refusal: str
    randomness: Randomness = field(default_factory=Randomness)
    blocks: Blocks | None = None  # of a base that stays on disk

    @property
    def packs_rows(self) -> bool:
        """Whether rows are packed into one list of tokens; else they are padded to rectangles, as always on a GPU."""
        return device().on_cpu and not self.packing_refusal

    @functools.cached_property
    def continues_padded(self) -> bool:
        """Whether a padded batch of prompts gives the same answers as single prompts; tried once on a few tokens."""
        return not padding_refusal(self.module)


def open_base(folder: Path, *, dequantize: bool, compute_dtype: str | None = None, stream: bool = False) -> BaseModel:
    """Load the model in ``folder``; raises ModelError when mlx-lm cannot.

    A GPU computes in ``compute_dtype``, None for the type that the model is stored in.

    With ``dequantize`` quantized weights are dequantized once; on CPU they are otherwise dequantized at each use. There
    everything that is dequantized becomes float32, because only float32 products go through the BLAS (measured: 16-bit
    ones run at 6 GFLOP/s).

    With ``stream`` the weights stay on disk, and each block is read when it is computed.
    """
    with errors_told("load the model", str(folder)):
        module, config = load(folder)
        eos_ids = _eos_ids(folder, config)
        if not stream:
            module = ready_to_compute(module, dequantize=dequantize, compute_dtype=compute_dtype)
            return BaseModel(module, eos_ids, *adapt(module))

        def open_lazily() -> Any:
            return ready_to_compute(load(folder)[0], dequantize=dequantize, compute_dtype=compute_dtype, read=False)

        blocks = Blocks(folder, open_lazily)
        model = BaseModel(blocks.module, eos_ids, *adapt(blocks.module), blocks=blocks)
        blocks.require_chain(model.module if model.split is None else model.split.trunk, packed=model.packs_rows)
        return model


def dequantize_to_answer(files: ModelFiles) -> bool:
    """Whether to dequantize a quantized base to generate: on CPU, while that takes at most a quarter of the memory."""
    return device().on_cpu and 4 * files.parameters <= psutil.virtual_memory().available // 4


def _eos_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Ids that end an answer: those of generation_config.json where it has some, else of config.json."""
    generation = folder / "generation_config.json"
    if generation.is_file():
        config = {**config, **json.loads(generation.read_text(encoding="utf-8"))}
    ids = config.get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else [ids] if ids is not None else [])

"""Opens a base model with mlx-lm, ready to compute."""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from safetrain.core.model.files import ModelFiles
from safetrain.engine.backend import device
from safetrain.engine.layers import Randomness, RowLengths
from safetrain.engine.upstream.adaptation import Adaptation, adapt
from safetrain.engine.upstream.generation import padding_refusal
from safetrain.engine.upstream.loading import errors_told, load, ready_to_compute


@dataclass(frozen=True)
class BaseModel:
    """A model ready for use, and the ids that end its answers."""

    module: Any  # an mlx_lm model: called with (rows, tokens) ids, returns (rows, tokens, vocabulary) logits
    eos_ids: frozenset[int]
    adaptation: Adaptation
    randomness: Randomness = field(default_factory=Randomness)
    lengths: RowLengths = field(default_factory=RowLengths)  # of the weights under DoRA

    @property
    def packs_rows(self) -> bool:
        """Whether rows of different lengths can be packed into one list of tokens."""
        return not self.adaptation.packing_refusal

    @functools.cached_property
    def continues_padded(self) -> bool:
        """Whether a padded batch of prompts gives the same answers as single prompts; tried once on a few tokens."""
        return not padding_refusal(self.module)


def open_base(folder: Path, *, dequantize: bool, compute_dtype: str | None = None) -> BaseModel:
    """Load the model in ``folder``; raises ModelError when mlx-lm cannot.

    A GPU computes in ``compute_dtype``, None for the type that the model is stored in.

    With ``dequantize`` quantized weights are dequantized once; on CPU they are otherwise dequantized at each use. There
    everything that is dequantized becomes float32, because only float32 products go through the BLAS (measured: 16-bit
    ones run at 6 GFLOP/s).
    """
    with errors_told("load the model", str(folder)):
        module, config = load(folder)
        eos_ids = _eos_ids(folder, config)
        module = ready_to_compute(module, dequantize=dequantize, compute_dtype=compute_dtype)
        return BaseModel(module, eos_ids, adapt(module))


def dequantize_to_answer(files: ModelFiles) -> bool:
    """Whether to dequantize a quantized base to generate: on CPU, while that takes at most a quarter of the memory."""
    return device().dequantizes_per_use and 4 * files.parameters <= psutil.virtual_memory().available // 4


def _eos_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Ids that end an answer: those of generation_config.json where it has some, else of config.json."""
    generation = folder / "generation_config.json"
    if generation.is_file():
        config = {**config, **json.loads(generation.read_text(encoding="utf-8"))}
    ids = config.get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else [ids] if ids is not None else [])

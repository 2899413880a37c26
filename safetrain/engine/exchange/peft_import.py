"""An adapter that PEFT wrote becomes one of this project's: read, checked against the base, tried, written."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from safetrain.core.errors import ModelError
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.peft_config import PeftShape, read_peft_config, require_same_names
from safetrain.core.storage.files import full_disk_named, require_new
from safetrain.engine.adapter_folder import save_adapter
from safetrain.engine.adapters import make_trainable, set_adapter_weights
from safetrain.engine.exchange.peft_arrays import ImportedAdapter, from_peft
from safetrain.engine.model import BaseModel, open_base

TRIED_TOKENS = 16  # spread over the vocabulary
NO_CHANGE = 1e-5  # of the largest logit: what float32 rounds


@dataclass(frozen=True)
class PeftImportJob:
    """A PEFT adapter to import, its base, and the folder to write."""

    source: Path  # that PEFT wrote
    base: Path
    out: Path


@dataclass(frozen=True)
class PeftImportReport:
    """What was brought in. ``moved``: the most that it changes a logit of a few tokens, out of ``largest``."""

    imported: ImportedAdapter
    shape: PeftShape
    moved: float
    largest: float


def import_peft(job: PeftImportJob) -> PeftImportReport:
    """Write the adapter in ``job.source`` to ``job.out``, whole or not at all, as mlx-lm and this project read it.

    Raises ConfigError where the target is there, ModelError for what has no counterpart, does not fit the base or
    changes nothing, DiskFullError.
    """
    parent = require_new(job.out)
    shape, files = read_peft_config(job.source), read_model_files(job.base)
    require_same_names(job.base)
    model = open_base(job.base, dequantize=False)
    before = _logits(model, files)
    imported = put_on(model, job.source, shape)
    largest, moved = float(np.abs(before).max()), float(np.abs(_logits(model, files) - before).max())
    if not moved > NO_CHANGE * largest:
        raise ModelError(
            "The adapter changes nothing: with it the model gives the logits of its base.",
            where=str(job.source),
            expected=f"more than {NO_CHANGE * largest:.1e}, which is rounding",
            got=f"{moved:.1e}",
            do="it was never trained, or saved before it was: save the trained one",
        )
    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        save_adapter(model, imported.method, imported.lora, job.base, job.out, base_fingerprint=files.fingerprint)
    return PeftImportReport(imported, shape, moved, largest)


def put_on(model: BaseModel, source: Path, shape: PeftShape) -> ImportedAdapter:
    """Put the adapter in ``source`` on an opened base, ready to compute; raises ModelError."""
    imported = from_peft(source, shape, model)
    make_trainable(model, imported.method, dataclasses.replace(imported.lora, dropout=0.0), seed=0)
    set_adapter_weights(model, imported.weights)
    model.module.eval()
    mx.eval(model.module.parameters())
    return imported


def _logits(model: BaseModel, files: ModelFiles) -> np.ndarray:
    """(tokens, vocabulary) of tokens that are spread over the vocabulary."""
    ids = np.linspace(0, files.vocab_size - 1, TRIED_TOKENS).astype(np.int64).tolist()
    return np.array(model.module(mx.array([ids]))[0].astype(mx.float32))

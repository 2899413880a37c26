"""What the ranks of a training share: the state that rank 0 hands out, and the facts and weights that they compare."""

import dataclasses
import hashlib
import importlib.metadata
import json

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from safetrain.core.data.row_order import Cursor
from safetrain.core.records.run_state import RunIdentity
from safetrain.engine.backend import device
from safetrain.engine.model import BaseModel
from safetrain.engine.optimizer import BlockOptimizer
from safetrain.engine.ranks import Ranks
from safetrain.engine.state import TrainState
from safetrain.engine.trainable import adapter_weights, set_adapter_weights

PACKAGES = ("safetrain", "mlx", "mlx-lm", "numpy")
DIGEST_BYTES = 16


def facts_of(identity: RunIdentity) -> dict[str, str]:
    """What has to be the same on all ranks, by name."""
    return {
        "base model": _short(identity.base_model),
        "training rows": _short(identity.training_rows),
        "validation rows": _short(identity.validation_rows),
        "settings": _short(identity.settings),
        "random order of rows": _short(identity.draws),
        "kind of device": device().name,
        **versions(),
    }


def versions() -> dict[str, str]:
    """Of what decides the numbers, and the form of the job."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def hand_out(ranks: Ranks, state: TrainState, model: BaseModel, optimizer: BlockOptimizer) -> TrainState:
    """Weights, the optimizer's state and the position of rank 0 on all ranks; its records stay with it."""
    bare = dataclasses.asdict(dataclasses.replace(state, records=[])) if ranks.writes else {}
    value = json.loads(ranks.broadcast(json.dumps(bare).encode()))
    weights = ranks.broadcast_arrays(adapter_weights(model))
    moments = ranks.broadcast_arrays(dict(tree_flatten(optimizer.state)))
    if ranks.writes:
        return state
    set_adapter_weights(model, weights)
    optimizer.state = tree_unflatten(list(moments.items()))
    mx.eval(model.module.trainable_parameters(), optimizer.state)
    return TrainState(**{**value, "cursor": Cursor(**value["cursor"])})


def require_same_weights(ranks: Ranks, model: BaseModel, step: int) -> None:
    """Raise EngineError, on all ranks, where one's trained weights are not those of rank 0."""
    found = hashlib.sha256()
    for name, array in sorted(adapter_weights(model).items()):
        found.update(name.encode())
        found.update(np.array(array.reshape(-1).view(mx.uint8)).data)
    ranks.require_same_weights(found.digest()[:DIGEST_BYTES], step)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

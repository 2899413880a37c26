"""mlx's optimizers, applied to one transformer block at a time, and the learning rate of each update.

In pretraining adamw and muon do not decay norms and biases. Muon updates the matrices inside blocks; AdamW updates
embedding, head and norms (Jordan et al., kellerjordan.github.io/posts/muon). Muon's steps are as long as AdamW's, so
that one learning rate serves both: the orthogonal matrix times 0.2 sqrt(longer side), and weight decay apart from the
gradient (arXiv 2502.16982).
"""

import math
import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from safetrain.core.records.schema import PRETRAIN
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.backend import device
from safetrain.engine.layers import Trained, part_at
from safetrain.engine.model import BaseModel

BLOCK = re.compile(r".*?\.\d+\.")  # the beginning of a parameter's name, up to the number of its block
FLOOR = 0.1  # final share of the peak learning rate in cosine, linear and wsd
BETAS, EPSILON = [0.9, 0.95], 1e-8  # usual for pretraining (arXiv 2005.14165, appendix B)
ADAMW_LENGTH = 0.2  # root mean square of AdamW's changes, in units of the learning rate (arXiv 2502.16982)
DECAY_SHARE = 0.2  # of the run: the last part of wsd (warm-up, stable, decay; arXiv 2404.06395)
Tree = Any  # of arrays, shaped like the trainable parameters
Arrays = list[mx.array]


class BlockOptimizer:
    """One of mlx's optimizers. Old and new values are in memory together for only one block at a time.

    ``compiled``: one program for all blocks of the same kind, with one kernel per parameter.
    """

    def __init__(self, mlx_optimizer: optim.Optimizer, *, compiled: bool = False) -> None:
        self._mlx = mlx_optimizer
        self._of_block: Callable[..., Any] = mx.compile(self._pure) if compiled else self._pure

    @property
    def state(self) -> Tree:
        """State for a checkpoint: number of updates, learning rate and each parameter's moments."""
        return self._mlx.state

    @state.setter
    def state(self, state: Tree) -> None:
        self._mlx.state = state

    def init(self, parameters: Tree) -> None:
        """Create new optimizer state for ``parameters``; call before the first update."""
        self._mlx.init(parameters)

    def update(self, trained: Trained, gradient: Tree, rate: float, scale: float) -> None:
        """Update the trained arrays with the gradient times ``scale``, at learning rate ``rate``."""
        step, now, evaluate = self._mlx.step + 1, mx.array(rate), mx.eval if device().on_cpu else mx.async_eval
        for _, block in groupby(tree_flatten(gradient), key=lambda item: block_of(item[0])):
            names, gradients = zip(*block, strict=True)
            own = [part_at(self.state, name) for name in names]
            old = list(trained.arrays(names).values()), [dict(state) for state in own]
            new, states = self._of_block(list(gradients), *old, step, now, mx.array(scale))
            del old  # so that mlx can reuse their memory
            for state, values in zip(own, states, strict=True):
                state.update(values)
            trained.put(dict(zip(names, new, strict=True)))
            evaluate(new, states)
        self.state["step"], self.state["learning_rate"] = step, now
        evaluate(step, now)

    def _pure(
        self, gradients: Arrays, parameters: Arrays, states: list[Any], step: mx.array, rate: mx.array, scale: mx.array
    ) -> tuple[Arrays, list[Any]]:
        """New parameters and their optimizer state."""
        self.state["step"], self.state["learning_rate"] = step, rate
        each = zip(gradients, parameters, states, strict=True)
        return [self._mlx.apply_single(gradient * scale, parameter, own) for gradient, parameter, own in each], states


def apply_gradient(
    model: BaseModel, optimizer: BlockOptimizer, gradient: Tree, norm: float, rate: float, max_grad_norm: float
) -> None:
    """Scale the gradient down to ``max_grad_norm`` and make one optimizer step at learning rate ``rate``."""
    optimizer.update(model.trained, gradient, rate, min(1.0, max_grad_norm / (norm + 1e-6)))


def optimizer_of(settings: TrainSettings) -> BlockOptimizer:
    """The optimizer in the settings; compiled on a GPU, where launching many kernels would be slow."""
    own = mlx_optimizer(settings.optimizer, settings.weight_decay, whole_model=settings.method == PRETRAIN)
    return BlockOptimizer(own, compiled=not device().on_cpu)


def mlx_optimizer(name: str, weight_decay: float, *, whole_model: bool = False) -> optim.Optimizer:
    """Build mlx's optimizer. ``name`` is from the schema; each update passes its own learning rate."""
    if name in ("adamw", "muon") and whole_model:
        return _WholeModel(weight_decay, muon=name == "muon")
    if name == "adam":
        return optim.Adam(0.0, bias_correction=True)
    if name == "adamw":
        return optim.AdamW(0.0, weight_decay=weight_decay, bias_correction=True)
    return optim.Muon(0.0, weight_decay=weight_decay)


class _WholeModel(optim.Adam):
    """AdamW without decay of vectors; with ``muon``, Muon for the matrices inside blocks."""

    def __init__(self, weight_decay: float, *, muon: bool) -> None:
        super().__init__(0.0, betas=BETAS, eps=EPSILON, bias_correction=True)
        self._decay, self._muon = weight_decay, optim.Muon(0.0) if muon else None

    def init(self, parameters: Any) -> None:
        """One momentum for Muon's matrices, two moments for all others."""
        super().init(parameters)
        for name, parameter in tree_flatten(parameters):
            if self._muon is not None and block_of(name) and parameter.ndim == 2:
                state = part_at(self.state, name)
                state.clear()
                self._muon.init_single(parameter, state)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        muon, shrinkage = self._muon, 1 - self.learning_rate * self._decay if parameter.ndim > 1 else 1.0
        if muon is None or "m" in state:
            return super().apply_single(gradient, parameter * shrinkage, state)
        momentum = muon.momentum * state["v"] + (1 - muon.momentum) * gradient
        state["v"] = momentum
        ahead = (1 - muon.momentum) * gradient + muon.momentum * momentum  # Nesterov's
        rate = self.learning_rate * ADAMW_LENGTH * max(parameter.shape) ** 0.5
        return parameter * shrinkage - rate * muon._zeropower_via_newtonschulz5(ahead, muon.ns_steps)


def learning_rate(update: int, peak: float, warmup_updates: int, total_updates: int, schedule: str = "cosine") -> float:
    """Linear warm-up to ``peak``, then ``schedule``. ``update`` counts from 0."""
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    progress = min(1.0, (update - warmup_updates) / max(1, total_updates - warmup_updates))
    share = {  # 1 at the peak, 0 at the floor
        "constant": 1.0,
        "linear": 1.0 - progress,
        "wsd": min(1.0, (1.0 - progress) / DECAY_SHARE),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[schedule]
    return peak * (FLOOR + (1 - FLOOR) * share)


def block_of(name: str) -> str:
    """The beginning of a parameter's name, up to its block's number; empty outside of blocks."""
    match = BLOCK.match(name)
    return match[0] if match else ""

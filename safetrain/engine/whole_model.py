"""Optimizers for a model that is trained whole: not every weight is a matrix between hidden states.

With adamw and muon, norms and biases are not decayed. Muon takes the matrices inside blocks; embedding, head and norms
go to AdamW (Jordan et al., kellerjordan.github.io/posts/muon). Its steps are as long as AdamW's, so that one learning
rate serves both: the orthogonal matrix times 0.2 sqrt(longer side), and weight decay apart from the gradient
(arXiv 2502.16982).
"""

from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from safetrain.engine.optimizer import block_of, of_mlx, part_at

BETAS, EPSILON = [0.9, 0.95], 1e-8  # usual for pretraining (arXiv 2005.14165, appendix B)
ADAMW_LENGTH = 0.2  # root mean square of what AdamW changes a number by, in learning rates (arXiv 2502.16982)


def of_whole_model(name: str, weight_decay: float) -> optim.Optimizer:
    """The optimizer of the schema's ``name`` for all weights of a model; raises ConfigError as ``of_mlx`` does."""
    if name == "adamw":
        return _DecayingMatrices(weight_decay)
    if name == "muon":
        return _MuonInBlocks(weight_decay)
    return of_mlx(name, weight_decay)


class _DecayingMatrices(optim.Adam):
    """AdamW that leaves the size of vectors alone."""

    def __init__(self, weight_decay: float) -> None:
        super().__init__(0.0, betas=BETAS, eps=EPSILON, bias_correction=True)
        self._decay = weight_decay

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """One parameter's new value."""
        kept = 1 - self.learning_rate * self._decay if parameter.ndim > 1 else 1.0
        return super().apply_single(gradient, parameter * kept, state)


class _MuonInBlocks(_DecayingMatrices):
    """Muon for what it has a momentum of, AdamW for everything else."""

    def __init__(self, weight_decay: float) -> None:
        super().__init__(weight_decay)
        self._muon = optim.Muon(0.0)

    def init(self, parameters: Any) -> None:
        """One momentum of the matrices inside blocks, two moments of all others."""
        super().init(parameters)
        for name, parameter in tree_flatten(parameters):
            if block_of(name) and parameter.ndim == 2:
                kept = part_at(self.state, name)
                kept.clear()
                self._muon.init_single(parameter, kept)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """One parameter's new value."""
        if "m" in state:
            return super().apply_single(gradient, parameter, state)
        muon = self._muon
        momentum = muon.momentum * state["v"] + (1 - muon.momentum) * gradient
        state["v"] = momentum
        ahead = (1 - muon.momentum) * gradient + muon.momentum * momentum  # Nesterov's
        rate = self.learning_rate * ADAMW_LENGTH * max(parameter.shape) ** 0.5
        orthogonal = muon._zeropower_via_newtonschulz5(ahead, muon.ns_steps)
        return parameter * (1 - self.learning_rate * self._decay) - rate * orthogonal

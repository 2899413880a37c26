"""mlx's optimizers, at work on one transformer block after the other.

The learning rate of each update is a pure function of its number.
"""

import math
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from safetrain.core.errors import ConfigError
from safetrain.engine.backend import cpu_stream
from safetrain.engine.blas import blas_threads

MOMENTUM = 0.9  # of plain descent
BLOCK = re.compile(r".*?\.\d+\.")  # the beginning of a parameter's name, up to the number of its block
FLOOR = 0.1  # share of the peak at which the learning rates cosine, linear and wsd end
DECAY_SHARE = 0.2  # of the run: the last part of wsd (warm-up, stable, decay; arXiv 2404.06395)

Tree = Any  # of arrays, shaped as the trainable parameters


class BlockOptimizer:
    """One of mlx's optimizers, whose new values stand beside the old ones for one block only.

    ``compiled``: one program for all blocks of the same kind, in which each parameter is one kernel. ``streams``: of a
    CPU, on which the parameters of a block are updated side by side (measured: benchmarks/bench_optimizer.py).
    """

    def __init__(self, mlx_optimizer: optim.Optimizer, *, compiled: bool = False, streams: int = 1) -> None:
        self._mlx, self._streams = mlx_optimizer, streams
        self._of_block: Callable[..., Any] = mx.compile(self._pure) if compiled else self._pure

    @property
    def state(self) -> Tree:
        """What a checkpoint must hold: the number of updates, the learning rate, and what is kept of each parameter."""
        return self._mlx.state

    @state.setter
    def state(self, state: Tree) -> None:
        self._mlx.state = state

    def init(self, parameters: Tree) -> None:
        """Begin anew; call before the first update."""
        self._mlx.init(parameters)

    def update(self, module: Any, gradient: Tree, rate: float, scale: float, evaluate: Callable[..., None]) -> None:
        """One update of the module's parameters, along the gradient times ``scale``, at learning rate ``rate``.

        ``evaluate`` is called with what each block has become.
        """
        step, now = self._mlx.step + 1, mx.array(rate)
        with blas_threads(self._streams):
            for _, block in groupby(tree_flatten(gradient), key=lambda item: block_of(item[0])):
                names, gradients = zip(*block, strict=True)
                self._update_block(module, names, gradients, (step, now, mx.array(scale)))
                evaluate([part_at(module, name) for name in names], [part_at(self.state, name) for name in names])
        self.state["step"], self.state["learning_rate"] = step, now
        evaluate(step, now)

    def _update_block(
        self, module: Any, names: Iterable[str], gradients: Iterable[mx.array], numbers: tuple[mx.array, ...]
    ) -> None:
        """Leaves no reference to the old values, so that mlx may write the new ones in their place."""
        parameters = [part_at(module, name) for name in names]
        kept = [dict(part_at(self.state, name)) for name in names]
        compute = self._of_block if self._streams == 1 else self._on_streams
        new, kept = compute(list(gradients), parameters, kept, *numbers)
        for name, values in zip(names, kept, strict=True):
            part_at(self.state, name).update(values)
        module.update(tree_unflatten(list(zip(names, new, strict=True))))

    def _on_streams(
        self,
        gradients: list[mx.array],
        parameters: list[mx.array],
        kept: list[dict[str, mx.array]],
        *numbers: mx.array,
    ) -> tuple[list[mx.array], list[dict[str, mx.array]]]:
        """As ``_pure``, the largest parameters first, each on the stream with the least to do."""
        new, waiting = list(parameters), [0] * self._streams
        for place in sorted(range(len(new)), key=lambda place: -new[place].size):
            stream = waiting.index(min(waiting))
            waiting[stream] += new[place].size
            with mx.stream(cpu_stream(stream)):
                one = [gradients[place]], [parameters[place]], [kept[place]]
                (new[place],), _ = self._pure(*one, *numbers)
        return new, kept

    def _pure(
        self,
        gradients: list[mx.array],
        parameters: list[mx.array],
        kept: list[dict[str, mx.array]],
        step: mx.array,
        rate: mx.array,
        scale: mx.array,
    ) -> tuple[list[mx.array], list[dict[str, mx.array]]]:
        """New parameters and what is kept of each."""
        self.state["step"], self.state["learning_rate"] = step, rate
        each = zip(gradients, parameters, kept, strict=True)
        new = [self._mlx.apply_single(gradient * scale, parameter, own) for gradient, parameter, own in each]
        return new, kept


def of_mlx(name: str, weight_decay: float) -> optim.Optimizer:
    """mlx's own optimizer; ``name`` is one of the schema's, and the learning rate is given with each update.

    Raises ConfigError for weight decay with Adam, which has none: adamw is that.
    """
    if name == "adam":
        if weight_decay:
            raise ConfigError("Adam has no weight decay.", got=f"{weight_decay:g}", do="train.optimizer=adamw")
        return optim.Adam(0.0, bias_correction=True)
    if name == "adamw":
        return optim.AdamW(0.0, weight_decay=weight_decay, bias_correction=True)
    if name == "adafactor":
        return optim.Adafactor(0.0, weight_decay=weight_decay, scale_parameter=False, relative_step=False)
    if name == "muon":
        return optim.Muon(0.0, weight_decay=weight_decay)
    if name == "sgd":
        return optim.SGD(0.0, momentum=MOMENTUM, weight_decay=weight_decay)
    raise ValueError(f"no optimizer is called {name!r}")


def learning_rate(update: int, peak: float, warmup_updates: int, total_updates: int, schedule: str = "cosine") -> float:
    """Linear warm-up to ``peak``, then as ``schedule`` says. ``update`` counts from 0."""
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    span = max(1, total_updates - warmup_updates)
    progress = min(1.0, (update - warmup_updates) / span)
    return peak * (FLOOR + (1 - FLOOR) * _share_of_peak(schedule, progress))


def _share_of_peak(schedule: str, progress: float) -> float:
    """1 at the peak, 0 at the floor."""
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "wsd":
        return min(1.0, (1.0 - progress) / DECAY_SHARE)
    return 0.5 * (1 + math.cos(math.pi * progress))


def block_of(name: str) -> str:
    """The beginning of a parameter's name, up to its block's number; empty outside of blocks."""
    found = BLOCK.match(name)
    return found[0] if found else ""


def part_at(tree: Tree, name: str) -> Any:
    """The part of a tree, or of a module, that a dotted name leads to."""
    for key in name.split("."):
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    return tree

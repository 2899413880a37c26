"""One optimizer update: gradients of all micro-batches summed, divided once by the label count, clipped, applied.

mlx's optimizers are applied to one transformer block at a time. The update's number determines the learning rate.

In pretraining adamw and muon do not decay norms and biases. Muon updates the matrices inside blocks; AdamW updates
embedding, head and norms (Jordan et al., kellerjordan.github.io/posts/muon). Muon's steps are as long as AdamW's, so
that one learning rate serves both: the orthogonal matrix times 0.2 sqrt(longer side), and weight decay apart from the
gradient (arXiv 2502.16982).
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_reduce, tree_unflatten

from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.formatting import counted
from safetrain.core.recorder import Edge, Phase, Recorder, Work, row_ids
from safetrain.core.records.schema import PRETRAIN
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.adapters import make_trainable
from safetrain.engine.backend import device
from safetrain.engine.batches import MicroBatch, Shard, Update
from safetrain.engine.block_loop import BlockLoop
from safetrain.engine.cpu.blas import blas_threads
from safetrain.engine.cpu.kernels import on_stream, side_by_side, streams_of
from safetrain.engine.layers import checkpoint, key_of
from safetrain.engine.loss import ShardLoss
from safetrain.engine.model import BaseModel, Blocks, open_base
from safetrain.engine.row_attention import Block, PackedRows
from safetrain.engine.upstream.loading import training_refusal

MOMENTUM = 0.9  # of SGD
BLOCK = re.compile(r".*?\.\d+\.")  # the beginning of a parameter's name, up to the number of its block
FLOOR = 0.1  # final share of the peak learning rate in cosine, linear and wsd
BETAS, EPSILON = [0.9, 0.95], 1e-8  # usual for pretraining (arXiv 2005.14165, appendix B)
ADAMW_LENGTH = 0.2  # root mean square of AdamW's changes, in units of the learning rate (arXiv 2502.16982)
DECAY_SHARE = 0.2  # of the run: the last part of wsd (warm-up, stable, decay; arXiv 2404.06395)

FOLLOWING = {Phase.FORWARD: Phase.LOSS, Phase.LOSS: Phase.BACKWARD}  # of the traced phases
Tree = Any  # of arrays, shaped like the trainable parameters: their gradients, optimizer state
Arrays = list[mx.array]


class Tracer:
    """Evaluates forward pass, loss and backward pass separately, to show which one crashes (train.trace).

    It writes a record and a line before and after each phase. The results equal an untraced run's.
    """

    def __init__(self, recorder: Recorder, say: Callable[[str], None]) -> None:
        self._recorder, self._say = recorder, say
        self._work = Work()

    def begin(self, work: Work) -> None:
        """Call before the graph of a shard is built."""
        self._work = work
        self._tell(Phase.FORWARD, Edge.BEFORE, f"{counted(work.rows, 'row')}, {counted(work.tokens, 'token')}")

    def done(self, phase: Phase, values: Any) -> Any:
        """Compute and return the phase's values, then start the phase that follows, if any."""
        mx.eval(values)
        is_output = phase is Phase.FORWARD
        detail = f"output {tuple(values.shape)} {str(values.dtype).split('.')[-1]}" if is_output else ""
        self._tell(phase, Edge.AFTER, detail)
        if phase in FOLLOWING:
            self._tell(FOLLOWING[phase], Edge.BEFORE)
        return values

    @contextmanager
    def optimizer(self, step: int) -> Iterator[None]:
        """Write a record and a line before and after the optimizer's step."""
        self._work = Work(step)
        self._tell(Phase.OPTIMIZER, Edge.BEFORE)
        yield
        self._tell(Phase.OPTIMIZER, Edge.AFTER)

    def _tell(self, phase: Phase, edge: Edge, detail: str = "") -> None:
        self._recorder.write(phase, edge, self._work)
        place = f"step {self._work.step}" + f" micro-batch {self._work.micro_batch}" * bool(self._work.rows)
        memory = f"mlx {mx.get_active_memory() / 2**20:,.0f} MiB"
        self._say(f"trace: {place}: {edge.name.lower()} {phase.label}{': ' + detail if detail else ''} ({memory})")


def prepare(
    base: Path, settings: TrainSettings, recorder: Recorder | None = None, tracer: Tracer | None = None
) -> tuple[BaseModel, "Gradients"]:
    """Open the base model with the given settings, make part of it trainable, and build its Gradients.

    Raises ModelError for a model family that cannot be trained.
    """
    if refusal := training_refusal(base):
        raise ModelError(f"{refusal}.", where=str(base), do="train a model of another family")
    model = open_base(
        base, dequantize=settings.dequantize_base, compute_dtype=settings.compute_dtype, stream=settings.stream_base
    )
    return model, equip(model, settings, recorder, tracer)


def equip(
    model: BaseModel, settings: TrainSettings, recorder: Recorder | None = None, tracer: Tracer | None = None
) -> "Gradients":
    """Make part of a model trainable and build its Gradients."""
    make_trainable(model, settings.method, settings.lora, settings.seed)
    blocks, dtype = model.module.layers[-settings.lora.num_layers :], None
    if settings.method == PRETRAIN:
        name, blocks = settings.compute_dtype, model.module.layers
        dtype = mx.float32 if name is None or device().on_cpu else getattr(mx, name)
    for block in blocks if settings.gradient_checkpointing and model.blocks is None else ():
        checkpoint(block)
    return Gradients(model, settings.seed, recorder=recorder, tracer=tracer, whole_model=dtype)


class Gradients:
    """Computes the gradient of an update. On CPU the shards of a micro-batch run in parallel, one thread each.

    On a GPU each shape's program is compiled once and kept; the parameters are inputs, so their values may change.
    ``whole_model`` is the compute type of pretraining, None for any other method: the weights and their gradients stay
    float32 (arXiv 1710.03740).
    """

    def __init__(
        self,
        model: BaseModel,
        seed: int,
        *,
        recorder: Recorder | None = None,
        tracer: Tracer | None = None,
        whole_model: mx.Dtype | None = None,
    ) -> None:
        self._model, self._seed, self._recorder, self._tracer = model, seed, recorder, tracer
        self._dtype, self.compiles = whole_model, not device().on_cpu and tracer is None
        observe = None
        if tracer is not None and model.blocks is None:
            observe = functools.partial(tracer.done, Phase.FORWARD)
        self._loss = ShardLoss(model, observe=observe, trains_head=whole_model is not None)
        self.programs: dict[tuple[Block, ...], Callable[..., Any]] = {}

    def of(self, update: Update, step: int, check_stop: Callable[[], None] = lambda: None) -> tuple[mx.array, Tree]:
        """Summed loss, and the gradient of the mean loss per label over the whole update, not yet evaluated.

        ``check_stop`` is called before each micro-batch, and may raise.

        Accumulation gives the gradient of one big batch, because every label of the update has the same weight,
        whatever its micro-batch. Each micro-batch is evaluated before the next one starts, so only one is in memory;
        the next one's graph is built meanwhile.
        """
        if self._model.blocks is not None:
            return self._by_blocks(self._model.blocks, update, step, check_stop)
        total, summed, share = mx.array(0.0), None, update.per_label(1.0)
        for number, batch in enumerate(update.micro_batches):
            check_stop()
            work = work_of(batch, step, number)
            if device().on_cpu:
                self._note(work)
            loss, gradient = self._of_micro_batch(batch, step, work, share)
            if summed is not None:
                mx.eval(total, summed)
                loss, gradient = total + loss, tree_map(mx.add, summed, gradient)
            if not device().on_cpu:  # a GPU starts only now
                self._note(work)
            mx.async_eval(loss, gradient)
            total, summed = loss, gradient
        if summed is None:  # a rank without rows in this update
            self._note(Work(step + 1))
            summed = tree_map(mx.zeros_like, self._model.module.trainable_parameters())
        return total * update.trained_tokens, summed

    def of_shard(self, shard: Shard, key: mx.array, share: float = 1.0) -> tuple[mx.array, Tree]:
        """The summed loss of a shard and the gradient of the trainable parameters, as lazy arrays.

        ``share``: weight of each label in the sum; 1 / labels of the update gives the mean.
        """
        module, layout = self._model.module, shard.layout
        parameters = module.trainable_parameters()
        arrays = [shard.inputs, layout.offsets, shard.positions, shard.targets, shard.weights * share, key]
        try:
            return self._program(layout.blocks)(parameters, *arrays)
        finally:
            module.update(parameters)  # tracing leaves placeholders behind

    def _by_blocks(
        self, blocks: Blocks, update: Update, step: int, check_stop: Callable[[], None]
    ) -> tuple[mx.array, Tree]:
        """Like ``of``, for a base on disk."""

        def tell(number: int, phase: Phase, values: Any) -> None:
            check_stop()
            work = work_of(update.micro_batches[number], step, number)
            self._note(work)
            if self._tracer is not None and phase is not Phase.GRADIENT:
                self._tracer.done(phase, values)
            elif self._tracer is not None and values is None:
                self._tracer.begin(work)

        loop = BlockLoop(self._model, blocks)
        return loop.gradient(self._loss, update, lambda shard: key_of(self._seed, step, shard.rows[0]), tell)

    def _note(self, work: Work) -> None:
        if self._recorder is not None:
            self._recorder.write(Phase.GRADIENT, Edge.BEFORE, work)

    def _of_micro_batch(self, batch: MicroBatch, step: int, work: Work, share: float) -> tuple[mx.array, Tree]:
        """Summed loss and gradient of a micro-batch: all its shards through the whole model."""

        def of_shard(shard: Shard) -> Any:
            key = key_of(self._seed, step, shard.rows[0])
            if self._tracer is None:
                return self.of_shard(shard, key, share)
            self._tracer.begin(work)
            return self._tracer.done(Phase.BACKWARD, self.of_shard(shard, key, share))

        with self._loss.one_head():
            losses, gradients = zip(*side_by_side(of_shard, batch.shards), strict=True)
        if not device().on_cpu:  # one shard, not computed yet
            return losses[0], gradients[0]
        total, summed = mx.stack(list(losses)).sum(), functools.reduce(functools.partial(tree_map, mx.add), gradients)
        mx.eval(total, summed)
        return total, summed

    def _program(self, blocks: tuple[Block, ...]) -> Callable[..., Any]:
        """The gradient function for this layout of rows; on a GPU each rectangle is compiled when it first occurs."""
        program = mx.value_and_grad(functools.partial(self._summed_loss, blocks))
        return self.programs.setdefault(blocks, mx.compile(program)) if self.compiles else program

    def _summed_loss(self, blocks: tuple[Block, ...], parameters: Tree, *arrays: mx.array) -> mx.array:
        inputs, offsets, positions, targets, weights, key = arrays
        model, dtype = self._model, self._dtype
        model.module.update(parameters if dtype is None else tree_map(lambda w: w.astype(dtype), parameters))
        model.randomness.key = key
        loss = self._loss(Shard(inputs, PackedRows(offsets, blocks), positions, targets, weights, (), None))
        return loss if self._tracer is None else self._tracer.done(Phase.LOSS, loss)


def work_of(batch: MicroBatch, step: int, number: int) -> Work:
    """The flight recorder's entry for a micro-batch of the update after ``step``."""
    tokens = sum(shard.inputs.size for shard in batch.shards)
    return Work(step + 1, number, len(batch.rows), tokens, row_ids(batch.rows))


def last_work_of(update: Update, step: int) -> Work:
    """The flight recorder's entry for an update's last micro-batch."""
    last = len(update.micro_batches) - 1
    return work_of(update.micro_batches[last], step, last) if update.micro_batches else Work(step + 1)


def measure(loss: mx.array, gradient: Tree) -> tuple[float, float]:
    """Wait for the summed loss and the gradient's norm: the one synchronisation of an update."""
    norm = mx.sqrt(tree_reduce(lambda total, array: total + mx.square(array).sum(), gradient, mx.array(0.0)))
    mx.eval(loss, norm)
    return float(np.array(loss)), float(np.array(norm))


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

    def update(self, module: Any, gradient: Tree, rate: float, scale: float) -> None:
        """Update the module's parameters with the gradient times ``scale``, at learning rate ``rate``."""
        step, now, evaluate = self._mlx.step + 1, mx.array(rate), mx.eval if device().on_cpu else mx.async_eval
        with blas_threads(device().shards):
            for _, block in groupby(tree_flatten(gradient), key=lambda item: block_of(item[0])):
                names, gradients = zip(*block, strict=True)
                old = [part_at(module, name) for name in names], [dict(part_at(self.state, name)) for name in names]
                new, states = self._of_block(list(gradients), *old, step, now, mx.array(scale))
                del old  # so that mlx can reuse their memory
                for name, values in zip(names, states, strict=True):
                    part_at(self.state, name).update(values)
                module.update(tree_unflatten(list(zip(names, new, strict=True))))
                evaluate(new, states)
        self.state["step"], self.state["learning_rate"] = step, now
        evaluate(step, now)

    def _pure(
        self, gradients: Arrays, parameters: Arrays, states: list[Any], step: mx.array, rate: mx.array, scale: mx.array
    ) -> tuple[Arrays, list[Any]]:
        """New parameters and their optimizer state."""
        self.state["step"], self.state["learning_rate"] = step, rate
        new, streams = list[mx.array](), streams_of([parameter.size for parameter in parameters])
        for gradient, parameter, own, stream in zip(gradients, parameters, states, streams, strict=True):
            with on_stream(stream):
                new.append(self._mlx.apply_single(gradient * scale, parameter, own))
        return new, states


def apply_gradient(
    model: BaseModel, optimizer: BlockOptimizer, gradient: Tree, norm: float, rate: float, max_grad_norm: float
) -> None:
    """Scale the gradient down to ``max_grad_norm`` and make one optimizer step at learning rate ``rate``."""
    scale = min(1.0, max_grad_norm / (norm + 1e-6))
    optimizer.update(model.module, gradient, rate, scale)


def optimizer_of(settings: TrainSettings) -> BlockOptimizer:
    """The optimizer in the settings; compiled on a GPU, where launching many kernels would be slow."""
    own = of_mlx(settings.optimizer, settings.weight_decay, whole_model=settings.method == PRETRAIN)
    return BlockOptimizer(own, compiled=not device().on_cpu)


def of_mlx(name: str, weight_decay: float, *, whole_model: bool = False) -> optim.Optimizer:
    """Build mlx's optimizer. ``name`` is from the schema; each update passes its own learning rate.

    Raises ConfigError for weight decay with Adam, which has none: use adamw.
    """
    if name in ("adamw", "muon") and whole_model:
        return _WholeModel(weight_decay, muon=name == "muon")
    if name == "adam" and weight_decay:
        raise ConfigError("Adam has no train.weight_decay.", got=f"{weight_decay:g}", do="set train.optimizer=adamw")
    if name == "adam":
        return optim.Adam(0.0, bias_correction=True)
    if name == "adamw":
        return optim.AdamW(0.0, weight_decay=weight_decay, bias_correction=True)
    if name == "adafactor":
        return optim.Adafactor(0.0, weight_decay=weight_decay, scale_parameter=False, relative_step=False)
    if name == "muon":
        return optim.Muon(0.0, weight_decay=weight_decay)
    return optim.SGD(0.0, momentum=MOMENTUM, weight_decay=weight_decay)


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
        """One parameter's new value."""
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


def part_at(tree: Tree, name: str) -> Any:
    """The part of a tree or module at a dotted name."""
    for key in name.split("."):
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    return tree

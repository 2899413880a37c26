"""One optimizer update: gradients of all micro-batches summed, divided once by the label count, clipped, applied."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_reduce

from safetrain.core.formatting import counted
from safetrain.core.recorder import Edge, Phase, Recorder, Work, row_ids
from safetrain.engine.adapters import measure_rows
from safetrain.engine.backend import device
from safetrain.engine.batches import MicroBatch, Shard, Update
from safetrain.engine.cpu.streams import side_by_side
from safetrain.engine.loss import ShardLoss
from safetrain.engine.model import BaseModel
from safetrain.engine.optimizer import BlockOptimizer
from safetrain.engine.randomness import key_of
from safetrain.engine.row_attention import Block, PackedRows

Gradient = Any  # a tree of arrays, shaped as the trainable parameters


@dataclass(frozen=True)
class UpdateResult:
    """The measurements of one update."""

    summed_loss: float  # nats over all labels of the update
    grad_norm: float  # of the mean gradient, before clipping


class Tracer:
    """Evaluates forward pass, loss and backward pass one by one, so that a death in an update has a name (train.trace).

    A record and a line before and after each. The numbers are those of an untraced run: the same graph, in three
    pieces.
    """

    def __init__(self, recorder: Recorder, say: Callable[[str], None]) -> None:
        self._recorder, self._say = recorder, say
        self.work = Work()

    def begin(self, work: Work) -> None:
        """Call before the graph of a part is built."""
        self.work = work
        self._write(Phase.FORWARD, Edge.BEFORE, f"{counted(work.rows, 'row')}, {counted(work.tokens, 'token')}")

    def observe(self, hidden: mx.array) -> mx.array:
        """Call with what the forward pass gives."""
        mx.eval(hidden)
        self._write(Phase.FORWARD, Edge.AFTER, f"output {tuple(hidden.shape)} {str(hidden.dtype).split('.')[-1]}")
        self._write(Phase.LOSS, Edge.BEFORE, "")
        return hidden

    def loss(self, loss: mx.array) -> mx.array:
        """Call with the loss."""
        mx.eval(loss)
        self._write(Phase.LOSS, Edge.AFTER, "")
        self._write(Phase.BACKWARD, Edge.BEFORE, "")
        return loss

    def end(self, gradient: Any) -> None:
        """Call with the gradient."""
        mx.eval(gradient)
        self._write(Phase.BACKWARD, Edge.AFTER, "")

    @contextmanager
    def optimizer(self, step: int) -> Iterator[None]:
        """Around the optimizer's work; the loop itself writes the records."""
        self.work = Work(step)
        self._tell(Phase.OPTIMIZER, Edge.BEFORE, "")
        yield
        self._tell(Phase.OPTIMIZER, Edge.AFTER, "")

    def _write(self, phase: Phase, edge: Edge, detail: str) -> None:
        self._recorder.write(phase, edge, self.work)
        self._tell(phase, edge, detail)

    def _tell(self, phase: Phase, edge: Edge, detail: str) -> None:
        memory = f"mlx {mx.get_active_memory() / 2**20:,.0f} MiB"
        when = f"trace: step {self.work.step} micro-batch {self.work.micro_batch}"
        when = when if self.work.rows else f"trace: step {self.work.step}"
        self._say(f"{when}: {edge.name.lower()} {phase.label}{': ' + detail if detail else ''} ({memory})")


class ShardGradient:
    """Gives the summed loss of a shard and its gradient in the trainable parameters, as lazy arrays.

    With ``compiled`` each shape is traced once and kept; the parameters are inputs, so their values may change.
    ``whole_model`` is the type in which a model that is trained whole computes, None for any other method: its weights
    and their gradients stay float32 (arXiv 1710.03740).
    """

    def __init__(
        self,
        model: BaseModel,
        *,
        compiled: bool = False,
        tracer: Tracer | None = None,
        whole_model: mx.Dtype | None = None,
    ) -> None:
        self._model, self._tracer, self._dtype = model, tracer, whole_model
        observe = None if tracer is None else tracer.observe
        self.loss = ShardLoss(model, training=True, observe=observe, trains_head=whole_model is not None)
        self.programs: dict[tuple[Block, ...], Callable[..., Any]] = {}
        self._compile = compiled

    def __call__(self, shard: Shard, key: mx.array, share: float = 1.0) -> tuple[mx.array, Gradient]:
        """``share``: of each label in the sum; one divided by the update's labels gives its mean."""
        module = self._model.module
        parameters = module.trainable_parameters()
        layout, weights = shard.layout, shard.weights * share
        arrays = [shard.inputs, layout.offsets, shard.positions, shard.targets, weights, key]
        try:
            return self._program(shard.layout.blocks)(parameters, *arrays)
        finally:
            module.update(parameters)  # tracing leaves placeholders behind

    def _program(self, blocks: tuple[Block, ...]) -> Callable[..., Any]:
        """The function for rows that lie so; a compiled one is kept for each rectangle (engine/layout.py)."""
        gradient = mx.value_and_grad(self._function(blocks))
        if not self._compile or len(blocks) > 1 or blocks[0].gather is not None:
            return gradient
        if blocks not in self.programs:
            self.programs[blocks] = mx.compile(gradient, inputs=self._model.lengths.values)
        return self.programs[blocks]

    def _function(self, blocks: tuple[Block, ...]) -> Callable[..., mx.array]:
        module, source, dtype = self._model.module, self._model.randomness, self._dtype

        def summed_loss(
            parameters: Gradient,
            inputs: mx.array,
            offsets: mx.array,
            positions: mx.array,
            targets: mx.array,
            weights: mx.array,
            key: mx.array,
        ) -> mx.array:
            module.update(parameters if dtype is None else tree_map(lambda w: w.astype(dtype), parameters))
            source.key = key
            loss = self.loss(Shard(inputs, PackedRows(offsets, blocks), positions, targets, weights, (), None))
            return loss if self._tracer is None else self._tracer.loss(loss)

        return summed_loss


class Gradients:
    """Computes the gradient of an update; on CPU the shards of a micro-batch run side by side, one thread each.

    Only the products are threaded inside mlx's CPU backend, everything else uses one core; two streams use two
    (measured: benchmarks/bench_throughput.py).
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
        compiled = device().compiles and tracer is None
        self._compute = ShardGradient(model, compiled=compiled, tracer=tracer, whole_model=whole_model)

    def of(self, update: Update, step: int, check_stop: Callable[[], None] = lambda: None) -> tuple[mx.array, Gradient]:
        """Summed loss, and the gradient of the mean loss per label over the whole update, not yet evaluated.

        ``check_stop`` is called before each micro-batch, and may raise.

        k micro-batches give the gradient of the one big batch, whatever their lengths, because sums add and each label
        counts for one in all of the update's. Each micro-batch is evaluated before the next is started, so that only
        one is in memory; the next one's graph is built meanwhile.
        """
        total, summed, share = mx.array(0.0), None, update.per_label(1.0)
        at_once = device().side_by_side
        for number, batch in enumerate(update.micro_batches):
            check_stop()
            work = work_of(batch, step, number)
            if at_once:
                self._note(Edge.BEFORE, work)
            loss, gradient = self._of_micro_batch(batch, step, work, share)
            if summed is not None:
                mx.eval(total, summed)
                loss, gradient = total + loss, tree_map(mx.add, summed, gradient)
            if not at_once:  # only now does a GPU begin with it
                self._note(Edge.BEFORE, work)
            mx.async_eval(loss, gradient)
            total, summed = loss, gradient
        if summed is None:  # a rank without rows in this update
            self._note(Edge.BEFORE, Work(step + 1))
            summed = tree_map(mx.zeros_like, self._model.module.trainable_parameters())
        return total * update.trained_tokens, summed

    def _note(self, edge: Edge, work: Work) -> None:
        if self._recorder is not None:
            self._recorder.write(Phase.GRADIENT, edge, work)

    def _of_micro_batch(self, batch: MicroBatch, step: int, work: Work, share: float) -> tuple[mx.array, Gradient]:
        def of_shard(_index: int, shard: Shard) -> tuple[mx.array, Gradient]:
            key = key_of(self._seed, step, shard.rows[0])
            if self._tracer is None:
                return self._compute(shard, key, share)
            self._tracer.begin(
                dataclasses.replace(work, rows=len(shard.rows), tokens=shard.inputs.size, row_ids=row_ids(shard.rows))
            )
            results = self._compute(shard, key, share)
            self._tracer.end(results)
            return results

        if not device().side_by_side:
            (shard,) = batch.shards
            return of_shard(0, shard)
        with self._compute.loss.one_head():
            results = side_by_side(of_shard, batch.shards)
        losses, gradients = [loss for loss, _ in results], [gradient for _, gradient in results]
        total, summed = mx.stack(losses).sum(), gradients[0]
        for gradient in gradients[1:]:
            summed = tree_map(mx.add, summed, gradient)
        mx.eval(total, summed)
        return total, summed


def last_work_of(update: Update, step: int) -> Work:
    """What the flight recorder says of an update's last micro-batch."""
    if not update.micro_batches:
        return Work(step + 1)
    last = len(update.micro_batches) - 1
    return work_of(update.micro_batches[last], step, last)


def norm_of(gradient: Gradient) -> mx.array:
    """Euclidean length of all numbers in the tree."""
    if not device().compiles:
        return mx.sqrt(tree_reduce(lambda total, array: total + mx.square(array).sum(), gradient, mx.array(0.0)))
    arrays = [array.reshape(-1) for _, array in tree_flatten(gradient)]  # an inner product is one kernel
    return _root_of_sum([mx.inner(array, array) for array in arrays])


@mx.compile
def _root_of_sum(squares: list[mx.array]) -> mx.array:
    """The root of a sum, in few kernels."""
    return mx.sqrt(sum(squares, mx.array(0.0)))


def measure(loss: mx.array, gradient: Gradient) -> UpdateResult:
    """Wait for loss and gradient norm: the one synchronisation of an update."""
    norm = norm_of(gradient)
    mx.eval(loss, norm)
    return UpdateResult(float(np.array(loss)), float(np.array(norm)))


def work_of(batch: MicroBatch, step: int, number: int) -> Work:
    """What the flight recorder says of a micro-batch of the update after ``step``."""
    tokens = sum(shard.inputs.size for shard in batch.shards)
    return Work(step + 1, number, len(batch.rows), tokens, row_ids(batch.rows))


def apply_gradient(
    model: BaseModel, optimizer: BlockOptimizer, gradient: Gradient, norm: float, rate: float, max_grad_norm: float
) -> None:
    """Scale the gradient down to ``max_grad_norm`` and make one optimizer step at learning rate ``rate``."""
    scale = min(1.0, max_grad_norm / (norm + 1e-6))
    evaluate = mx.eval if device().waits_for_each_update else mx.async_eval
    optimizer.update(model.module, gradient, rate, scale, evaluate)
    if model.lengths.values:
        measure_rows(model.module, evaluate)

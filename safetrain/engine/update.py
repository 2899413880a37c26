"""The gradient of one optimizer update: of all micro-batches, summed, divided once by the label count."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from safetrain.core.errors import ModelError
from safetrain.core.formatting import counted
from safetrain.core.recorder import Edge, Phase, Recorder, Work, row_ids
from safetrain.core.records.schema import DPO, PAIRED, PRETRAIN
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.adapters import make_trainable
from safetrain.engine.backend import device
from safetrain.engine.batches import MicroBatch, Pairs, Shard, Update
from safetrain.engine.block_loop import BlockLoop
from safetrain.engine.cpu.kernels import side_by_side
from safetrain.engine.layers import checkpoint, key_of
from safetrain.engine.loss import PairLoss, ShardLoss
from safetrain.engine.model import BaseModel, Blocks, open_base
from safetrain.engine.row_attention import Block, PackedRows
from safetrain.engine.upstream.loading import training_refusal

LIGHTEST = 64  # in float16 a label weighs about 1/64: more may overflow, less underflows (arXiv 1710.03740)
FOLLOWING = {Phase.FORWARD: Phase.LOSS, Phase.LOSS: Phase.BACKWARD}  # of the traced phases
Gradient = dict[str, mx.array]  # of each trained array, by its name


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
        detail = f"output {tuple(values.shape)} {str(values.dtype).split('.')[-1]}" if phase is Phase.FORWARD else ""
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
        raise ModelError(f"{refusal}.", where=base, do="train a model of another family")
    model = open_base(
        base, dequantize=settings.dequantize_base, compute_dtype=settings.compute_dtype, stream=settings.stream_base
    )
    if model.split is not None:
        split = dataclasses.replace(model.split, labels_at_once=settings.labels_at_once)
        model = dataclasses.replace(model, split=split)
    return model, equip(model, settings, recorder, tracer)


def equip(
    model: BaseModel, settings: TrainSettings, recorder: Recorder | None = None, tracer: Tracer | None = None
) -> "Gradients":
    """Make part of a model trainable and build its Gradients."""
    make_trainable(model, settings.adapter, settings.lora, settings.seed)
    blocks, dtype = model.module.layers[-settings.lora.num_layers :], None
    if settings.method == PRETRAIN:
        name, blocks = settings.compute_dtype, model.module.layers
        dtype = mx.float32 if name is None or device().on_cpu else getattr(mx, name)
    for block in blocks if settings.gradient_checkpointing and model.blocks is None else ():
        checkpoint(block)
    pair_loss = PairLoss(settings.method, settings.beta, mx) if settings.method in PAIRED else None
    return Gradients(model, settings.seed, recorder=recorder, tracer=tracer, whole_model=dtype, pair_loss=pair_loss)


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
        pair_loss: PairLoss | None = None,
    ) -> None:
        self._model, self._seed, self._recorder, self._tracer = model, seed, recorder, tracer
        self._dtype, self.compiles = whole_model, not device().on_cpu and tracer is None
        observe = None
        if tracer is not None and model.blocks is None:
            observe = functools.partial(tracer.done, Phase.FORWARD)
        types = [whole_model] if whole_model else [part.dtype for _, part in tree_flatten(model.module.parameters())]
        self._in_float16 = not device().on_cpu and mx.float16 in types
        self._loss = ShardLoss(model, observe=observe, trains_head=whole_model is not None, pair_loss=pair_loss)
        self.pair_loss = pair_loss
        self.programs: dict[tuple[Block, ...], Callable[..., Any]] = {}

    def of(self, update: Update, step: int, check_stop: Callable[[], None] = lambda: None) -> tuple[mx.array, Gradient]:
        """Summed loss, and the gradient of the mean loss per label over the whole update, not yet evaluated.

        In preference training it is the mean per pair, and the loss is that mean times the labels. ``check_stop`` is
        called before each micro-batch, and may raise.

        Accumulation gives the gradient of one big batch, because every label of the update has the same weight,
        whatever its micro-batch. Each micro-batch is evaluated before the next one starts, so only one is in memory;
        the next one's graph is built meanwhile.
        """
        if not self._in_float16:
            return self._of(update, step, check_stop)
        is_dpo = self.pair_loss is not None and self.pair_loss.method == DPO  # a pair's loss sums over its labels
        scale = 2.0 ** max(0, ((update.pairs if is_dpo else update.labels) // LIGHTEST).bit_length() - 1)
        loss, gradient = self._of(dataclasses.replace(update, scale=scale), step, check_stop)
        return loss / scale, tree_map(lambda part: part / scale, gradient)

    def _of(self, update: Update, step: int, check_stop: Callable[[], None]) -> tuple[mx.array, Gradient]:
        """Like ``of``, with loss and gradient times the update's scale."""
        if self._model.blocks is not None:
            return self._by_blocks(self._model.blocks, update, step, check_stop)
        total, summed, share = mx.array(0.0), None, update.share
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
            summed = tree_map(mx.zeros_like, self._model.trained.arrays())
        return total * update.labels, summed

    def of_shard(self, shard: Shard, key: mx.array, share: float = 1.0) -> tuple[mx.array, Gradient]:
        """The summed loss of a shard and its gradient, as lazy arrays.

        ``share``: weight of each label, or pair, in the sum; 1 / labels of the update gives the mean.
        """
        layout, pairs, parameters = shard.layout, shard.pairs, self._model.trained.arrays()
        weights = shard.weights if pairs is not None else shard.weights * share
        arrays = [shard.inputs, layout.offsets, shard.positions, shard.targets, weights, key]
        arrays += [] if pairs is None else [mx.array(share), pairs.rows, pairs.lengths, pairs.references]
        try:
            return self._program(layout.blocks)(parameters, *arrays)
        finally:
            self._model.trained.put(parameters)  # tracing leaves placeholders behind

    def _by_blocks(
        self, blocks: Blocks, update: Update, step: int, check_stop: Callable[[], None]
    ) -> tuple[mx.array, Gradient]:
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

    def _of_micro_batch(self, batch: MicroBatch, step: int, work: Work, share: float) -> tuple[mx.array, Gradient]:
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

    def _summed_loss(self, blocks: tuple[Block, ...], parameters: Gradient, *arrays: mx.array) -> mx.array:
        inputs, offsets, positions, targets, weights, key, *share_and_pairs = arrays
        model, dtype = self._model, self._dtype
        model.trained.put(parameters if dtype is None else tree_map(lambda w: w.astype(dtype), parameters))
        model.randomness.key = key
        layout, pairs = PackedRows(offsets, blocks), Pairs(*share_and_pairs[1:]) if share_and_pairs else None
        loss = self._loss(Shard(inputs, layout, positions, targets, weights, (), None, pairs), *share_and_pairs[:1])
        return loss if self._tracer is None else self._tracer.done(Phase.LOSS, loss)


def work_of(batch: MicroBatch, step: int, number: int) -> Work:
    """The flight recorder's entry for a micro-batch of the update after ``step``."""
    tokens = sum(shard.inputs.size for shard in batch.shards)
    return Work(step + 1, number, len(batch.rows), tokens, row_ids(batch.rows))


def measure(loss: mx.array, gradient: Gradient, meanwhile: Callable[[], None] = lambda: None) -> tuple[float, float]:
    """Wait for the summed loss and the gradient's norm: the one synchronisation of an update.

    ``meanwhile`` is called before, so that a GPU computes at the same time.
    """
    norm = (_norm if device().on_cpu else _compiled(_norm))(list(gradient.values()))
    mx.async_eval(loss, norm)
    meanwhile()
    return float(np.array(loss)), float(np.array(norm))


def _norm(gradient: list[mx.array]) -> mx.array:
    return mx.sqrt(functools.reduce(lambda total, array: total + mx.square(array).sum(), gradient, mx.array(0.0)))


_compiled = functools.cache(mx.compile)  # one program in place of a thousand small kernels

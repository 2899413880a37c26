"""Compares a saved adapter with the tuned model, by their outputs at labels; an export is compared in the same way.

Only the tuned model's hidden states stay in memory, and its head if another model's head may differ. The tuned model is
freed before another model is opened. Before the adapter check, all that only training needs is freed too.
"""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.errors import InterruptedRun, TrainingError
from safetrain.core.memory.terms import FLOAT32, Setup, chunk_tokens
from safetrain.core.model.files import ModelFiles
from safetrain.core.recorder import Edge, Phase, Work
from safetrain.core.records.evaluation import Likeness
from safetrain.core.records.metrics import Proof, proved_tokens
from safetrain.core.records.schema import HIGHER_RATE, PRETRAIN
from safetrain.engine.adapters import set_adapter_weights
from safetrain.engine.backend import device
from safetrain.engine.batches import Shard, in_order, layout_for
from safetrain.engine.block_loop import computed
from safetrain.engine.job import Job
from safetrain.engine.loss import through
from safetrain.engine.model import BaseModel, open_base
from safetrain.engine.run import TrainingRun, Watcher
from safetrain.engine.state import best_file
from safetrain.engine.upstream.adaptation import Head
from safetrain.engine.upstream.loading import adapt_for_a_consumer, holds_adapters
from safetrain.engine.weight_files import apply_adapter, load_arrays

NO_CHANGE = 1e-6  # nats per label: the rounding of a divergence computed in float32
ROUNDING_16_BIT = 5e-3  # the same between two ways to compute one model in 16 bits
OF_LOSS = 10  # times the limit of a divergence: rounding moves a loss by its size, a divergence by its square
NO_EFFECT = "The adapter changes nothing: base and tuned model give the same loss on every label."
DISCARD = f"discard this training run with 'safetrain discard', and train with {HIGHER_RATE}"

MOST_KEPT_BYTES = 2**27  # of labels' hidden states
PLACE_BITS = 32  # low bits of a label's key: its place in its row; the higher bits are the row
Beat = Callable[[], None]  # called before each micro-batch


@dataclass(frozen=True, eq=False)
class TunedModel:
    """The tuned model's outputs at labels, arrays of shape (labels,), in the order of rows and positions."""

    rows: TokenRows
    most_tokens: int  # that are computed together
    head: Callable[[], Head] | None  # None: use the compared model's head
    keys: np.ndarray  # int64: row and place
    losses: np.ndarray  # nats
    greedy: np.ndarray  # its most likely token
    right: np.ndarray  # whether that is the label
    states: np.ndarray  # (labels, width) before the head

    @classmethod
    def of(
        cls, model: BaseModel, rows: TokenRows, most_tokens: int, beat: Beat = lambda: None, *, keep_head: bool = True
    ) -> "TunedModel":
        """Measure a model. ``keep_head`` is needed only if another model's head may differ."""
        seen = _at_labels(model, rows, most_tokens, None, beat)
        return cls(rows, most_tokens, model.head_alone().head if keep_head else None, *seen)

    @property
    def own(self) -> Likeness:
        """The tuned model compared with itself."""
        return self._likeness(self.losses, self.greedy, self.right, np.zeros(1))

    def likeness_of(self, model: BaseModel, beat: Beat = lambda: None) -> Likeness:
        return self._likeness(*_at_labels(model, self.rows, self.most_tokens, self, beat)[1:])

    def _likeness(self, losses: np.ndarray, greedy: np.ndarray, right: np.ndarray, divergences: np.ndarray) -> Likeness:
        starts = np.flatnonzero(np.diff(self.keys >> PLACE_BITS, prepend=-1))  # of each row; every row has a label
        same, its, own = (np.logical_and.reduceat(each, starts) for each in (greedy == self.greedy, right, self.right))
        lost, won = int((own & ~its).sum()), int((its & ~own).sum())
        divergence = max(0.0, float(divergences.mean()))
        return Likeness(float(losses.mean()), divergence, float(same.mean()), int(its.sum()), lost, won)


def sample_of(rows: TokenRows, files: ModelFiles, model: BaseModel, most_tokens: int, least_rows: int = 1) -> TokenRows:
    """Choose evenly spread rows, about ``most_tokens`` tokens in all, but at least ``least_rows`` if memory allows."""
    width = files.vocab_size if model.split is None else files.hidden_size
    state_bytes = FLOAT32 * width * int(rows.label_counts.sum(dtype=np.int64))
    kept, read = MOST_KEPT_BYTES / state_bytes, most_tokens / int(rows.lengths.sum(dtype=np.int64))
    count = min(len(rows), int(kept * len(rows)), max(least_rows, int(read * len(rows))))
    return rows.take(np.linspace(0, len(rows) - 1, max(1, count)).round().astype(np.int64))


def _at_labels(
    model: BaseModel, rows: TokenRows, most_tokens: int, tuned: TunedModel | None, beat: Beat
) -> list[np.ndarray]:
    """Each label's key, loss, greedy token, whether it is right, and divergence from ``tuned`` (None: hidden state)."""
    model.module.eval()
    own = model.head()
    theirs = own if tuned is None or tuned.head is None else tuned.head()  # dequantizes it once at most
    layout = dataclasses.replace(layout_for(model, most_tokens), shards=1)
    chunks: list[tuple[np.ndarray, ...]] = []
    for batch in computed(model, in_order(rows, layout)):
        beat()
        for shard in batch.shards:
            chunks += _of_shard(model, shard, own, theirs, tuned)
    found = [np.concatenate(parts) for parts in zip(*chunks, strict=True)]
    order = np.argsort(found[0])
    return [each[order] for each in found]


def _of_shard(
    model: BaseModel, shard: Shard, head: Head, tuned_head: Head, tuned: TunedModel | None
) -> Iterator[tuple[np.ndarray, ...]]:
    labels = int(np.array(shard.weights).sum())
    positions, targets = shard.positions[:labels], shard.targets[:labels]
    states = through(model, shard)[positions]
    keys = np.asarray(shard.token_keys)[np.array(positions)]
    size = chunk_tokens(model.split.vocabulary if model.split is not None else states.shape[-1])
    size = size if tuned is None else max(1, size // 2)  # because of two models' logits
    for start in range(0, labels, size):
        some = slice(start, start + size)
        own, labels_here = _log_softmax(head(states[some])), targets[some]
        greedy = mx.argmax(own, axis=-1)
        mx.eval(own, greedy)  # before more arrays of this size exist
        if tuned is None:
            last = states[some].astype(mx.float32)
        else:
            places = np.searchsorted(tuned.keys, keys[some])
            theirs = _log_softmax(tuned_head(mx.array(tuned.states[places]).astype(states.dtype)))
            last = (mx.exp(theirs) * (theirs - own)).sum(axis=-1)
        losses = -mx.take_along_axis(own, labels_here[:, None].astype(mx.int32), axis=-1).squeeze(-1)
        values_here = (losses, greedy, greedy == labels_here, last)
        mx.eval(values_here)
        yield (keys[some], *(np.array(values) for values in values_here))


def _log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities in float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def remember_best(run: TrainingRun) -> TunedModel:
    """Measure the best model, restoring its weights first if training has continued past it.

    Raises TrainingError if the best weights' file was changed, InterruptedRun after a signal.
    """
    job, state = run.job, run.state
    best = best_file(job, state)
    if best is not None and state.best_step != state.step:
        set_adapter_weights(run.model, load_arrays(best))
    rows = sample_of(job.rows.valid, job.files, run.model, proved_tokens(job.tokens))
    with run.watcher.recorder.phase(Phase.VERIFY, Work(state.step)):
        beat, keep_head = _beat(run.watcher, state.step), job.settings.method == PRETRAIN
        return TunedModel.of(run.model, rows, run.layout.most_tokens, beat, keep_head=keep_head)


def prove(job: Job, tuned: TunedModel, watcher: Watcher, step: int) -> Proof:
    """Reopen the base and compare it with the tuned model; then load the adapter as mlx-lm does, and compare again.

    Call it after the training's model is freed. Raises TrainingError if the adapter has no effect or differs from the
    tuned model, ModelError if mlx-lm cannot open it, InterruptedRun after a signal.
    """
    gc.collect()
    settings, recorder, work = job.settings, watcher.recorder, Work(step)
    dequantize, dtype, stream = settings.dequantize_base, settings.compute_dtype, settings.stream_base
    with recorder.phase(Phase.LOAD_MODEL, work):
        model = open_base(job.files.folder, dequantize=dequantize, compute_dtype=dtype, stream=stream)
        if model.blocks is not None:
            model.blocks.pulse = recorder.repeat
        in_memory = not stream or settings.method != "dora"  # mlx-lm's DoRA reads all weights
        by_mlx_lm = in_memory and holds_adapters(model.module, settings.method)

    def compared() -> Likeness:
        with recorder.phase(Phase.VERIFY, work):
            return tuned.likeness_of(model, _beat(watcher, step))

    base = compared()
    with recorder.phase(Phase.LOAD_MODEL, work):
        if by_mlx_lm:
            adapt_for_a_consumer(model.module, job.adapters)
        else:
            apply_adapter(model, job.adapters)
    loss, opened_by = float(tuned.losses.mean()), "mlx-lm" if by_mlx_lm else "safetrain"
    proof = Proof(len(tuned.rows), len(tuned.keys), loss, base, compared(), opened_by)
    computes = Setup(job.files, settings, device().name)
    require_proof(proof, str(job.adapters), in_16_bit=computes.number_bytes < FLOAT32)
    return proof


def _beat(watcher: Watcher, step: int) -> Beat:
    """Show the supervisor that the check is alive, and stop it on a signal."""

    def beat() -> None:
        watcher.recorder.write(Phase.VERIFY, Edge.BEFORE, Work(step))
        if stop := watcher.stop():
            what = f"Stopped after step {step}, the last one, while checking the adapter."
            raise InterruptedRun(stop, what, do="run the same command again to finish")

    return beat


def require_proof(proof: Proof, adapter: str, *, in_16_bit: bool) -> None:
    """Raise TrainingError if the adapter has no effect, or if the saved folder is not the tuned model.

    In 16 bits, two ways to compute one model differ by a rounding that depends on the model, so the folder then fails
    only if it is as close to the base as to the tuned model.
    """
    base, opened = proof.base, proof.opened
    rounding, share = (ROUNDING_16_BIT, 0.5) if in_16_bit else (NO_CHANGE, 0.02)
    gained = abs(base.loss - proof.tuned_loss)
    if base.divergence < NO_CHANGE and gained < NO_CHANGE:
        raise TrainingError(NO_EFFECT, where=adapter, do=DISCARD)
    near, near_loss = max(rounding, share * base.divergence), max(OF_LOSS * rounding, share * gained)
    if not (opened.divergence <= near and abs(opened.loss - proof.tuned_loss) <= near_loss):
        raise TrainingError(
            "The saved adapter is not the trained model: mlx-lm loads a different one.",
            where=adapter,
            expected=f"divergence of at most {near:.1e} nats per label, and the tuned loss, {proof.tuned_loss:.4f}",
            got=f"divergence of {opened.divergence:.1e}, and a loss of {opened.loss:.4f}",
            do="run the same command again, and do not change the folder meanwhile; if it fails again, "
            "report this model's architecture",
        )

"""Opens the adapter's folder again, as its consumer will, and compares it with the model that was trained.

The tuned model leaves its states in the computer's memory and is freed before the base is opened again: no two models
are ever held, and nothing that only training needs (gradient, optimizer, activations of all blocks).
"""

import dataclasses
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.errors import InterruptedRun
from safetrain.core.memory.terms import FLOAT32, backend_of
from safetrain.core.model.files import read_model_files
from safetrain.core.recorder import Edge, Phase, Work
from safetrain.core.records.metrics import ComparedWith, Proof, require_proof
from safetrain.core.records.schema import PRETRAIN
from safetrain.engine.adapter_folder import ADAPTER_FILE, apply_adapter
from safetrain.engine.adapters import set_adapter_weights
from safetrain.engine.arrays import load_arrays
from safetrain.engine.backend import device
from safetrain.engine.effect import Reference, kept_head, likeness, look, measured_rows, no_head, refer_to
from safetrain.engine.job import Job
from safetrain.engine.model import open_base
from safetrain.engine.run import TrainingRun, Watcher
from safetrain.engine.state import best_file
from safetrain.engine.upstream.saving import adapt_for_a_consumer, holds_adapters

SAY_EVERY_SECONDS = 10.0
LEAST_TOKENS, MOST_TOKENS = 2**10, 2**12  # of validation rows, evenly spread: three passes through them
TRAINED_TO_PROVED = 100  # with so many times fewer tokens than were trained, a hundredth of the time


@dataclass(frozen=True, eq=False)
class TunedReference:
    """The best model of a training, as it was in memory, on the rows that others are compared with it on."""

    rows: TokenRows
    most_tokens: int  # that are computed together
    reference: Reference


def remember_best(run: TrainingRun) -> TunedReference:
    """Look at the best model, which is put back where training has gone on from it; nothing of it stays in mlx.

    Raises TrainingError where its file is not the one that was written, InterruptedRun.
    """
    job, state = run.job, run.state
    best = best_file(state, job.adapters / ADAPTER_FILE, job.output)
    if best is not None and state.best_step != state.step:
        set_adapter_weights(run.model, load_arrays(best))
    rows = measured_rows(job.valid, read_model_files(job.base), run.model, proved_tokens(job))
    watch = _ProofWatch(run.watcher, state.step)
    with watch.phase(Phase.VERIFY):
        reference = refer_to(run.model, rows, run.layout.most_tokens, watch.beats("as it was trained"))
    if job.settings.method == PRETRAIN:
        return TunedReference(rows, run.layout.most_tokens, dataclasses.replace(reference, head=kept_head(run.model)))
    headless = dataclasses.replace(
        reference, head=no_head
    )  # no other training changes the head: the opened model has it
    return TunedReference(rows, run.layout.most_tokens, headless)


def prove(job: Job, tuned: TunedReference, watcher: Watcher, step: int) -> Proof:
    """Open the base, then put the adapter's folder on it as mlx-lm does, and compare both with the tuned model.

    Call it when the training's model is gone. Raises TrainingError where the folder changes nothing, or is another
    model than the tuned one; ModelError where mlx-lm cannot open it; InterruptedRun.
    """
    gc.collect()
    settings, watch = job.settings, _ProofWatch(watcher, step)
    with watch.phase(Phase.LOAD_MODEL):
        model = open_base(job.base, dequantize=settings.dequantize_base, compute_dtype=settings.compute_dtype)
    comparisons, by_mlx_lm = list[ComparedWith](), holds_adapters(model.module, settings.method)
    for with_adapter in (False, True):
        beat = watch.beats("the adapter's folder, opened again" if with_adapter else "its base, opened again")
        if with_adapter:
            with watch.phase(Phase.LOAD_MODEL):
                if by_mlx_lm:
                    adapt_for_a_consumer(model.module, job.adapters)
                else:
                    apply_adapter(model, job.adapters)
        with watch.phase(Phase.VERIFY):
            readings = look(
                model, tuned.rows, tuned.most_tokens, tuned.reference, beat, same_head=settings.method != PRETRAIN
            )
        like = likeness(readings, tuned.reference.seen)
        comparisons.append(ComparedWith(like.loss, like.divergence, round(like.same_answers * len(tuned.rows))))
    labels, loss = len(tuned.reference.seen.keys), float(tuned.reference.seen.losses.mean())
    proof = Proof(len(tuned.rows), labels, loss, comparisons[0], comparisons[1], "mlx-lm" if by_mlx_lm else "safetrain")
    backend = backend_of(
        read_model_files(job.base), device().name, settings.dequantize_base, settings.method,
        compute_dtype=settings.compute_dtype,
    )  # fmt: skip
    require_proof(proof, str(job.adapters), in_16_bit=backend.compute_bytes < FLOAT32)
    return proof


def proved_tokens(job: Job) -> int:
    """Tokens of validation rows that the adapter is checked on, if there are as many."""
    return min(MOST_TOKENS, max(LEAST_TOKENS, job.tokens // TRAINED_TO_PROVED))


def passes_over(job: Job) -> float:
    """Time of the whole adapter check, in validations: three passes over a sample of the rows."""
    return 3 * min(1.0, proved_tokens(job) / max(1, job.valid.tokens))


@dataclass(frozen=True)
class _ProofWatch:
    """Tells the supervisor that the proof goes on, and ends it on a signal."""

    watcher: Watcher
    step: int

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Around a part of it."""
        return self.watcher.recorder.phase(phase, Work(self.step))

    def beats(self, subject: str) -> Callable[[], None]:
        """To be called before each micro-batch of one of the three passes; a long one is reported with its progress."""
        said_seconds, micro_batches = time.monotonic(), 0

        def beat() -> None:
            nonlocal said_seconds, micro_batches
            self.watcher.recorder.write(Phase.VERIFY, Edge.BEFORE, Work(self.step))
            if time.monotonic() - said_seconds > SAY_EVERY_SECONDS:
                said_seconds = time.monotonic()
                self.watcher.say(f"proof: {subject}: micro-batch {micro_batches + 1}")
            micro_batches += 1
            if stop := self.watcher.stop():
                what = f"Stopped after step {self.step}, the last one, while the adapter was opened again."
                raise InterruptedRun(stop, what, do="the same command finishes")

        return beat

"""Checks the saved adapter: loads it from its folder and compares it with the model that was trained.

The tuned model's hidden states stay in memory, but the model is freed before the base is opened again. So memory never
holds two models, nor anything that only training needs (gradient, optimizer, activations of all blocks).
"""

import gc
from collections.abc import Callable

from safetrain.core.errors import InterruptedRun
from safetrain.core.memory.estimate import setup_of
from safetrain.core.memory.terms import FLOAT32
from safetrain.core.model.files import read_model_files
from safetrain.core.recorder import Edge, Phase, Work
from safetrain.core.records.metrics import ComparedWith, Proof, proved_tokens, require_proof
from safetrain.core.records.schema import PRETRAIN
from safetrain.engine.adapters import set_adapter_weights
from safetrain.engine.backend import device
from safetrain.engine.job import Job
from safetrain.engine.model import open_base
from safetrain.engine.run import TrainingRun, Watcher
from safetrain.engine.state import best_file
from safetrain.engine.tuned import TunedModel, sample_of
from safetrain.engine.upstream.loading import adapt_for_a_consumer, holds_adapters
from safetrain.engine.weight_files import ADAPTER_FILE, apply_adapter, load_arrays


def remember_best(run: TrainingRun) -> TunedModel:
    """Measure the best model, restoring its weights first if training has continued past it.

    Only a trained head stays in mlx. Raises TrainingError if the best weights' file was changed, InterruptedRun after a
    signal.
    """
    job, state = run.job, run.state
    best = best_file(state, job.adapters / ADAPTER_FILE, job.output)
    if best is not None and state.best_step != state.step:
        set_adapter_weights(run.model, load_arrays(best))
    rows = sample_of(job.valid, read_model_files(job.base_folder), run.model, proved_tokens(job.tokens))
    with run.watcher.recorder.phase(Phase.VERIFY, Work(state.step)):
        beat, keep_head = _beat(run.watcher, state.step), job.settings.method == PRETRAIN
        return TunedModel.of(run.model, rows, run.layout.most_tokens, beat, keep_head=keep_head)


def prove(job: Job, tuned: TunedModel, watcher: Watcher, step: int) -> Proof:
    """Open the base, load the adapter's folder as mlx-lm does, and compare both with the tuned model.

    Call it after the training's model is freed. Raises TrainingError if the adapter has no effect or differs from the
    tuned model; ModelError if mlx-lm cannot open it; InterruptedRun after a signal.
    """
    gc.collect()
    settings, recorder, work = job.settings, watcher.recorder, Work(step)
    with recorder.phase(Phase.LOAD_MODEL, work):
        model = open_base(
            job.base_folder, dequantize=settings.dequantize_base, compute_dtype=settings.compute_dtype,
            stream=settings.stream_base,
        )  # fmt: skip
        if model.blocks is not None:
            model.blocks.pulse = recorder.repeat
        in_memory = not settings.stream_base or settings.method != "dora"  # mlx-lm's DoRA reads all weights
        by_mlx_lm = in_memory and holds_adapters(model.module, settings.method)

    def compared() -> ComparedWith:
        with recorder.phase(Phase.VERIFY, work):
            like = tuned.likeness_of(model, _beat(watcher, step))
        return ComparedWith(like.loss, like.divergence, round(like.same_answers * len(tuned.rows)))

    base = compared()
    with recorder.phase(Phase.LOAD_MODEL, work):
        if by_mlx_lm:
            adapt_for_a_consumer(model.module, job.adapters)
        else:
            apply_adapter(model, job.adapters)
    loss, opened_by = float(tuned.losses.mean()), "mlx-lm" if by_mlx_lm else "safetrain"
    proof = Proof(len(tuned.rows), len(tuned.keys), loss, base, compared(), opened_by)
    computes = setup_of(read_model_files(job.base_folder), settings, device().name)
    require_proof(proof, str(job.adapters), in_16_bit=computes.number_bytes < FLOAT32)
    return proof


def _beat(watcher: Watcher, step: int) -> Callable[[], None]:
    """For each micro-batch: show the supervisor that the check is alive, and stop it on a signal."""

    def beat() -> None:
        watcher.recorder.write(Phase.VERIFY, Edge.BEFORE, Work(step))
        if stop := watcher.stop():
            what = f"Stopped after step {step}, the last one, while checking the adapter."
            raise InterruptedRun(stop, what, do="run the same command again to finish")

    return beat

"""Tests whether a model opens and trains, compares a pass with mlx-lm's own, and makes dry runs of a training."""

import dataclasses
import functools
import math
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import Cursor, largest_update_rows, rows_at
from safetrain.core.errors import ModelError, SafetrainError
from safetrain.core.memory.system import most_footprint_bytes
from safetrain.core.memory.terms import MOST_SHARDS, WIDTH_STEP, widths_of
from safetrain.core.model.files import read_model_files
from safetrain.core.recorder import Recorder
from safetrain.core.records.settings import (
    ALL_LINEAR,
    DRY_RUN_SLOW_SECONDS,
    DRY_RUN_TIMED_SECONDS,
    SMALLEST,
    DryRun,
    LoraSettings,
    updates_per_epoch,
)
from safetrain.core.storage.files import with_traceback
from safetrain.engine.adapters import adapted_names
from safetrain.engine.backend import device, time_operation
from safetrain.engine.batches import Update, fill, training_layout, update_at, update_of_rows
from safetrain.engine.cpu.blas import cores, use_threads
from safetrain.engine.job import Job, own_largest_update
from safetrain.engine.model import BaseModel, open_base
from safetrain.engine.run import TrainingRun, Watcher, open_run
from safetrain.engine.training import make_update, record, save, update_of
from safetrain.engine.update import equip, prepare
from safetrain.engine.upstream.adaptation import Refusal, are_close, asked, few_blocks, numbers, refusals
from safetrain.engine.upstream.loading import NO_MEMORY, plain_model, training_refusal

RANK, SCALE, SEED, MOST_LAYERS = 8, 2.0, 7, 4
SPREAD = 0.02  # standard deviation of the adapter's random numbers; with the usual zeros half the gradient is 0
TRIED_TOKENS = 8
MOST_TIMED = 6  # updates, or rows, that a dry run times
MOST_PADDING = 4096  # tokens: with more, a rectangle would be mostly padding
CLEARLY_FASTER = 0.8  # share of the time with all threads; other programs may be busy only now
RATE = 1e-6  # learning rate of a dry run, whose weights are discarded
Measured = tuple[int, float, int]  # an update: mlx's memory peak in bytes, seconds, and tokens


def load(folder: Path) -> dict[str, object]:
    """Open the model as stored, run one token through it, then compute a gradient on a few tokens.

    If possible it runs only some blocks, at least one of each kind, because a large model takes long.
    """
    if refusal := training_refusal(folder):  # before opening it, which is slow
        return {"loads": False, "load_error": refusal, "load_seconds": 0.0, "trains": False, "train_error": refusal}
    began = time.perf_counter()
    try:
        model = open_base(folder, dequantize=False)
        with few_blocks(model.module) as fewer:
            result = try_tokens(model, began)
        if fewer and result.get("trains") is False:
            del model  # memory may not hold two models
            result = try_tokens(open_base(folder, dequantize=False), began)
        return result
    except SafetrainError as error:
        return {"loads": False, "load_error": with_traceback(error, in_one_line=True), "load_seconds": 0.0}


def try_tokens(model: BaseModel, began: float) -> dict[str, object]:
    """Test whether the model computes one token and a gradient; a result is None if memory is too small."""
    fault = ""
    try:
        if mx.any(mx.isnan(asked(model.module, mx.array([[0]])))).item():  # -inf is allowed: it bars tokens
            fault = "the model gives NaN for one token"
    except Refusal as error:
        if NO_MEMORY.search(str(error)):
            return {"loads": None}
        fault = f"the model fails on one token: {error}"
    result = {"loads": not fault, "load_error": fault, "load_seconds": round(time.perf_counter() - began, 3)}
    refusal = fault or training_fault(model)
    trains = None if not fault and NO_MEMORY.search(refusal) else not refusal
    return {**result, "trains": trains, "train_error": refusal}


def training_fault(model: BaseModel) -> str:
    """Why the model cannot be trained here; empty if it can."""
    row = list(range(1, TRIED_TOKENS + 1))
    try:
        logits = asked(model.module, mx.array([row, [*row[:-1], row[-1] + 1]]))[:, :-1]
    except Refusal as error:
        return f"the model fails on {TRIED_TOKENS} tokens: {error}"
    one, other = (mx.where(mx.isfinite(values), values, 0.0) for values in logits)
    if not are_close([one], [other]):
        return "in mlx-lm this model's tokens also see the tokens after them"
    return gradient_fault(model)


def gradient_fault(model: BaseModel) -> str:
    """Why the backward pass fails in the model's current blocks; empty if it works."""
    lora = LoraSettings(1, 1.0, 0.0, len(model.module.layers), (ALL_LINEAR,))
    settings = dataclasses.replace(SMALLEST, max_seq_length=TRIED_TOKENS, lora=lora)
    data = TokenRows.of([token_row(range(TRIED_TOKENS), [True] * TRIED_TOKENS)])
    try:
        gradients = equip(model, settings)
        model.module.train()
        with refusals():
            loss, gradient = gradients.of(update_at(data, Cursor(0, 0), 1, 1, training_layout(model, 1, data)), 0)
            mx.eval(loss, gradient)
    except SafetrainError as error:
        return error.what
    except Refusal as error:
        return f"mlx-lm's model has no gradient here: {error}"
    finite = np.isfinite(as_vector(gradient)).all() and np.isfinite(numbers(loss))
    return "" if finite else f"the gradient of {TRIED_TOKENS} tokens is NaN"


def examine(folder: Path, rows: int, tokens: int) -> dict[str, Any]:
    """Compare a forward and backward pass with mlx-lm's own layers and a plain cross-entropy; differences are relative.

    It uses ``rows`` random rows of up to ``tokens`` tokens; the second half of each row is trained.
    """
    files = read_model_files(folder)
    lora = LoraSettings(RANK, SCALE, 0.0, min(MOST_LAYERS, files.num_layers), (ALL_LINEAR,))
    data = random_rows(rows, tokens, files.vocab_size)
    model, gradients = prepare(folder, dataclasses.replace(SMALLEST, batch_size=rows, max_seq_length=tokens, lora=lora))
    weights = spread(model.module)
    update = update_at(data, Cursor(0, 0), SEED, rows, training_layout(model, rows, data))
    model.module.train()
    for _ in range(2):  # the first pass compiles
        mx.reset_peak_memory()
        began = time.perf_counter()
        loss, gradient = gradients.of(update, 0)
        mx.eval(loss, gradient)
        seconds = time.perf_counter() - began
    peak = mx.get_peak_memory()
    ours, vector = float(np.array(loss)) / update.labels, as_vector(gradient)
    packs_rows, keys = model.packs_rows, adapted_names(model)
    del model, gradients, gradient
    expected_loss, expected, in_float32 = _textbook(folder, lora, keys, weights, data)
    if not np.isfinite(expected).all():
        raise ModelError(f"{files.model_type} cannot be trained: with mlx-lm's own layers its gradient is NaN.")
    return {
        "layers_with_adapter": lora.num_layers,
        "packs_rows": packs_rows,
        "in_float32": in_float32,
        "on_cpu": device().name == "cpu",
        "loss": ours,  # nats per label
        "loss_difference": abs(ours - expected_loss) / abs(expected_loss),
        "gradient_difference": float(np.linalg.norm(vector - expected) / np.linalg.norm(expected)),
        "step_seconds": seconds,
        "tokens_per_second": update.input_tokens / seconds,
        "peak_memory_bytes": peak,
    }


def _textbook(
    folder: Path, lora: LoraSettings, keys: list[str], weights: dict[str, mx.array], data: TokenRows
) -> tuple[float, np.ndarray, bool]:
    """Loss and gradient of mlx-lm's unchanged model and LoRA layers, summed row by row; whether outputs are float32."""
    module = plain_model(folder, lora, keys, in_float32=device().on_cpu)
    module.load_weights(list(weights.items()), strict=False)
    module.train()  # some models have kernels without a gradient, which they use only in evaluation
    count = sum(sum(row.trained.tolist()[1:]) for row in data)

    def loss_of(module: Any, ids: mx.array, labels: mx.array) -> mx.array:
        losses = nn.losses.cross_entropy(module(ids[None, :-1]).astype(mx.float32), ids[None, 1:])
        return (losses * labels[1:]).sum() / count

    loss, summed = 0.0, np.zeros(1)
    for row in data:
        labels = mx.array([float(trained) for trained in row.trained.tolist()])
        part, gradient = nn.value_and_grad(module, loss_of)(module, mx.array(row.ids.tolist()), labels)
        mx.eval(part, gradient)
        loss, summed = loss + float(np.array(part)), as_vector(gradient) + summed
    module.eval()
    return loss, summed, module(mx.array([[1]])).dtype == mx.float32


def spread(module: Any) -> dict[str, mx.array]:
    """Give the adapter random numbers; returns them by name."""
    mx.random.seed(SEED)
    weights = {n: w + SPREAD * mx.random.normal(w.shape) for n, w in tree_flatten(module.trainable_parameters())}
    module.load_weights(list(weights.items()), strict=False)
    mx.eval(list(weights.values()))
    return weights


def as_vector(tree: Any) -> np.ndarray:
    """All numbers of a tree of arrays in one vector, arrays sorted by name."""
    return np.concatenate([numbers(part).ravel() for _, part in sorted(tree_flatten(tree))]).astype(np.float64)


def random_rows(rows: int, tokens: int, vocabulary: int) -> TokenRows:
    """Random rows of decreasing length; the second half of each row is trained."""
    source = np.random.default_rng(SEED)
    lengths = [max(4, tokens - 3 * index) for index in range(rows)]
    return TokenRows.of([
        token_row(source.integers(1, vocabulary, n).tolist(), [index >= n // 2 for index in range(n)]) for n in lengths
    ])  # fmt: skip


# A dry run


def dry_run(job: Job, scratch: Path) -> DryRun:
    """Make the largest updates, validate and save; then time a few ordinary updates if updates are quick."""
    run, made, own = _open(job, scratch), list[Measured](), list[Measured]()
    run.layout = dataclasses.replace(run.layout, padding_tokens=_padding_tokens(run))
    largest_updates = _largest_updates(run)
    for largest, is_own in largest_updates:
        made.append(_make(run, largest))
        own += made[-1:] if is_own else []
        if made[0][1] > DRY_RUN_SLOW_SECONDS:
            break
    record(run, validate=True)
    save(run)
    rows = job.rows.train
    mean_tokens = int(rows.inputs().sum(dtype=np.int64)) / updates_per_epoch(len(rows), job.settings.rows_per_update)
    _, seconds, tokens = made[-1]
    threads = cores() if device().on_cpu else None
    if seconds / tokens * mean_tokens <= DRY_RUN_SLOW_SECONDS:
        timed = _time_updates(run, DRY_RUN_TIMED_SECONDS)
        if threads is not None:
            timed, threads = _with_fewer_threads(run, timed, threads)
    else:
        timed = made[1:] or made if device().on_cpu else [_make(run, largest)]  # on a GPU the first one compiles
    update_seconds = mean_tokens * statistics.median(seconds / tokens for _, seconds, tokens in timed)
    own_update = own_largest_update(job, device().name) if len(made) == len(largest_updates) else None
    own_peak, peak = (max(peak for peak, _, _ in [*group, *timed]) for group in (own, made))
    label, padding = device().label, run.layout.padding_tokens
    return DryRun(peak, most_footprint_bytes(), update_seconds, label, own_update, own_peak, threads, padding)


def _open(job: Job, scratch: Path) -> TrainingRun:
    """Open the training run with its memory limits, but with only the longest validation rows."""
    output, settings = scratch / "output", dataclasses.replace(job.settings, max_loss_jump=None)
    output.mkdir()
    longest, unit = job.rows.valid.by_length[: settings.batch_size], job.rows.valid.rows_per_pair
    rows = dataclasses.replace(job.rows, valid=job.rows.valid.take(job.rows.valid.rows_of(np.unique(longest // unit))))
    for each in (rows.train.documents, rows.valid):  # a dry run needs no reference
        each.references = np.zeros(len(each), dtype=np.float32)
    trial = dataclasses.replace(
        job, settings=settings, trace=False, rows=rows, output=output, adapters=scratch / "adapters"
    )
    return open_run(trial, Watcher(lambda *_: None, lambda _: None, lambda: 0, Recorder(scratch / "recorder.bin")))


def _padding_tokens(run: TrainingRun) -> int:
    """Padding that takes a GPU as long as another micro-batch, in tokens: a power of two.

    Timed: rows of middle length in one rectangle, and each alone. A micro-batch takes a fixed time and a time per
    token.
    """
    layout, window = run.layout, rows_at(run.job.rows.train, Cursor(0, 0), SEED, run.job.settings.rows_per_update)
    rows = window.rows[len(window.rows) // 2 :][:MOST_TIMED]
    rows = rows[: layout.most_tokens // int(widths_of(window.data.inputs(rows)).max())]
    if device().on_cpu or run.model.blocks is not None or layout.rows_per_pair > 1 or len(rows) < 2:
        return layout.padding_tokens
    run.model.module.train()
    together, alone = (update_of_rows(window.data, groups, layout) for groups in ([rows], [[row] for row in rows]))
    began = time.perf_counter()
    mx.eval(run.gradients.of(together, 0))
    if time.perf_counter() - began > DRY_RUN_SLOW_SECONDS:
        return layout.padding_tokens
    one, several = (time_operation(functools.partial(run.gradients.of, each, 0)) for each in (together, alone))
    per_token = (len(rows) * one - several) / (len(rows) * together.computed_tokens - alone.computed_tokens)
    worth = one / per_token - together.computed_tokens if per_token > 0 else MOST_PADDING
    return 2 ** round(math.log2(min(max(worth, WIDTH_STEP), MOST_PADDING)))


def _make(run: TrainingRun, update: Update) -> Measured:
    began = time.perf_counter()
    make_update(run, update, RATE, began)
    mx.eval(run.model.module.trainable_parameters(), run.optimizer.state)
    return mx.get_peak_memory(), time.perf_counter() - began, update.input_tokens


def _time_updates(run: TrainingRun, most_seconds: float) -> list[Measured]:
    """Time ordinary updates; on a GPU each runs twice, because the first time compiles its shapes."""
    updates = list[Measured]()
    windows = updates_per_epoch(len(run.job.rows.train), run.job.settings.rows_per_update)
    for window in range(min(1, windows - 1), min(1 + MOST_TIMED, windows)):  # the first window has the longest row
        update = update_of(run, Cursor(0, window))
        if not device().on_cpu:
            _make(run, update)
        updates.append(_make(run, update))
        if _seconds(updates) > most_seconds:
            break
    return updates


def _with_fewer_threads(run: TrainingRun, timed: list[Measured], threads: int) -> tuple[list[Measured], int]:
    """Time the same updates with fewer threads; keep these if they are clearly faster.

    Slow updates are not timed again: their products are large. Beside one busy program all threads stay the choice.
    """
    for fewer in (MOST_SHARDS, 1):
        most_seconds = CLEARLY_FASTER * _seconds(timed)
        if fewer < threads and _seconds(timed) < DRY_RUN_TIMED_SECONDS:
            use_threads(fewer)
            run.layout = dataclasses.replace(run.layout, shards=min(run.layout.shards, fewer))
            again = _time_updates(run, most_seconds)
            if len(again) == len(timed) and _seconds(again) < most_seconds:
                timed, threads = again, fewer
    return timed, threads


def _seconds(updates: list[Measured]) -> float:
    return sum(seconds for _, seconds, _ in updates)


def _largest_updates(run: TrainingRun) -> list[tuple[Update, bool]]:
    """Updates made of the largest micro-batches, and whether each is from the training's own order of rows.

    They are taken from the updates with the longest row, the most tokens and the most labels, in the training's own
    order and in other random orders; the update with the most tokens comes first. If training adds up the gradients of
    several micro-batches, a micro-batch of one row comes before the large one, so that memory is used as in training.
    """
    data, settings, layout = run.job.rows.train, run.job.settings, run.layout
    length = settings.rows_per_update, settings.num_epochs, settings.max_steps
    first = rows_at(data, Cursor(0, 0), settings.seed, settings.rows_per_update)
    own = [first, *largest_update_rows(data, *length, (settings.seed,))]
    taken, updates = list[object](), list[tuple[Update, bool]]()
    for number, window in enumerate([*own, *largest_update_rows(data, *length)]):
        labels, groups = window.data.label_counts, list(fill(window.data, window.rows, layout))
        tokens = [update_of_rows(window.data, [rows], layout).computed_tokens for rows in groups]
        for rows in (groups[int(np.argmax(tokens))], max(groups, key=lambda rows: int(labels[rows].sum()))):
            if (window.data, rows) not in taken:
                taken.append((window.data, rows))
                before = [groups[-1][-layout.rows_per_pair :]] if len(groups) > 1 else []
                updates.append((update_of_rows(window.data, [*before, rows], layout), number < len(own)))
    return sorted(updates, key=lambda each: -each[0].computed_tokens)

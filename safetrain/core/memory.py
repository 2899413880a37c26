"""A closed-form estimate of mlx's peak memory in training, term by term. Pure arithmetic on a model's headers.

Peak = what is always there + the larger of two phases: forward and backward, with every layer's stored activations,
and the optimizer, with old and new moments side by side. benchmarks/bench_memory_estimate.py compares the sum with
mlx's own peak. In core, because the plan chooses by it and ``train`` checks what it was given.
"""

import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.model_files import ModelFiles
from safetrain.core.settings import ALL_LINEAR, LoraSettings, MemoryTerm, TrainSettings, is_target

MARGIN = 1.15  # the closed form is not calibrated on this machine
PROCESS_BYTES = 200 * 2**20  # Python, mlx, tokenizer: 0.14 GiB resident before training (measured, Linux CPU)
WIDTH_STEP = 32  # the engine pads rows to a multiple of this, which bounds the number of shapes
RESIDENT_COPIES = 3  # float32 weight and Adam's two moments; the best weights so far are one more
ADAPTED_LAYERS = 7  # linear layers of a block, at most
OPTIMIZER_COPIES = 2.3  # more while the optimizer works: gradient, and new values beside old ones (measured)
CHUNK_BYTES = 64 * 2**20  # of logits, their softmax and their gradient at one time
MIN_CHUNK_TOKENS = 32
MOST_PARTS = 4  # of a micro-batch that are computed side by side on CPU; each has a chunk of its own
LOGIT_COPIES = 5  # float32 numbers per logit alive in a chunk (measured: 4 to 5)
WHOLE_LOGIT_COPIES = 10  # with what capping and gathering keep (measured: 9.8)
CHUNKS_ALIVE = 2  # mlx starts the next chunk before it has freed the one before (measured)
QUERY_TILE = 128  # queries that are scored together on CPU
SCORE_COPIES_TRANSIENT = 2.5  # further copies of the attention scores in the layer at work (measured)
FLOAT32 = 4
GIB = 2**30
TERM_NAMES = {
    "stored": "stored activations",
    "recomputed": "recomputed block",
    "scores": "attention scores",
    "unpacked": "weights unpacked per use",
    "logits": "logits and loss",
    "gradient": "gradient",
}
LAYER_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
LAYER_WEIGHT = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)\.weight$")


@dataclass(frozen=True)
class Shape:
    """What a micro-batch looks like: rows and tokens per row, padding included, and whether others accumulate."""

    rows: int
    tokens: int
    accumulates: bool


@dataclass(frozen=True)
class Coefficients:
    """Factors on the terms that depend on how a backend computes. 1 is the closed form, which is on the safe side;
    measured on a machine (plan/calibration.py) they are what its own updates took."""

    stored: float = 1.0  # activations that blocks keep for the backward pass
    recomputed: float = 1.0  # those of the one block at work, where blocks are recomputed
    scores: float = 1.0  # of attention
    logits: float = 1.0
    unpacked: float = 1.0  # packed weights, unpacked at each use
    gradient: float = 1.0  # of the trained weights: at the peak, part of it is not there yet


CLOSED_FORM = Coefficients()


@dataclass(frozen=True)
class Backend:
    """What the estimate must know of where and how it runs."""

    compute_bytes: int  # of one number in the residual stream
    dequantize_base: bool
    computes_in_float32: bool  # CPU: unpacked weights become float32
    method: str = "lora"
    checkpointing: bool = False
    coefficients: Coefficients = CLOSED_FORM


def backend_of(
    model: ModelFiles, name: str, dequantize_base: bool, method: str = "lora", *, checkpointing: bool = False
) -> Backend:
    """The backend called cpu, metal or cuda, for this model."""
    # blocks that are trained whole are float32, and so is what they compute
    compute_bytes = FLOAT32 if name == "cpu" or method == "full" else model.compute_bytes
    return Backend(compute_bytes, dequantize_base, name == "cpu", method, checkpointing)


def usable_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def padded(tokens: int) -> int:
    """Tokens per row once padded."""
    return -(-tokens // WIDTH_STEP) * WIDTH_STEP


def chunk_tokens(vocabulary: int, parts: int = 1) -> int:
    """Labels whose logits each of ``parts`` that run at the same time may have in memory at one time."""
    return max(MIN_CHUNK_TOKENS, CHUNK_BYTES // (parts * CHUNKS_ALIVE * LOGIT_COPIES * FLOAT32 * vocabulary))


def predicted_peak(
    model: ModelFiles, lora: LoraSettings, shape: Shape, backend: Backend, *, keeps_best: bool = True
) -> tuple[MemoryTerm, ...]:
    """The terms of the peak of mlx's allocator, in bytes; their sum is the prediction.

    ``keeps_best``: a training holds the best weights so far, a probe does not.
    """
    adapter = FLOAT32 * trained_parameters(model, lora, backend.method)
    sizes, factors = forward_bytes(model, lora, shape, backend), backend.coefficients
    forward = (
        *((MemoryTerm("accumulated gradient", adapter),) if shape.accumulates else ()),
        *(MemoryTerm(TERM_NAMES[name], int(getattr(factors, name) * size)) for name, size in sizes.items() if size),
    )
    optimizer = (MemoryTerm("optimizer at work", int(OPTIMIZER_COPIES * adapter)),)
    return (
        MemoryTerm("base weights", base_bytes(model, backend)),
        MemoryTerm("trained weights and Adam", (RESIDENT_COPIES + keeps_best) * adapter),
        *max(forward, optimizer, key=total_bytes),
    )


def forward_bytes(model: ModelFiles, lora: LoraSettings, shape: Shape, backend: Backend) -> dict[str, int]:
    """What forward and backward pass keep, by the name of its coefficient, before that is applied."""
    block = activation_bytes(model, shape, backend.compute_bytes)
    block += adapter_activation_bytes(model, lora, shape, backend)
    inputs = shape.rows * shape.tokens * model.hidden_size * backend.compute_bytes
    stored_blocks = 1 if backend.checkpointing else lora.num_layers
    return {
        "stored": lora.num_layers * (inputs if backend.checkpointing else block),
        "recomputed": block if backend.checkpointing else 0,
        "scores": score_bytes(model, stored_blocks, shape, backend.compute_bytes),
        "unpacked": unpacked_bytes(model, backend),
        "logits": logit_bytes(model, shape),
        "gradient": FLOAT32 * trained_parameters(model, lora, backend.method),
    }


def total_bytes(terms: tuple[MemoryTerm, ...]) -> int:
    """Their sum."""
    return sum(term.size_bytes for term in terms)


def fits(peak_bytes: int, budget_bytes: int, factor: float = MARGIN) -> bool:
    """Whether a predicted peak, with margin and the process around it, is within the budget."""
    return peak_bytes * factor + PROCESS_BYTES <= budget_bytes


def check_run(model: ModelFiles, settings: TrainSettings, longest: int, backend: Backend, budget_bytes: int) -> int:
    """Predicted peak of a run whose longest row has ``longest`` tokens: the small check of what train was given.

    Pins on the command line have not been through the plan. Raises ConfigError when the model cannot take the settings,
    MachineError when they do not fit.
    """
    require_trainable(settings.method, packed=model.quantization_bits is not None)
    if model.max_positions is not None and settings.max_seq_length > model.max_positions:
        raise ConfigError(
            f"train.max_seq_length is {settings.max_seq_length}, longer than the model's context.",
            expected=f"at most {model.max_positions}",
        )
    terms = peak_of_run(model, settings, longest, backend)
    if not fits(total_bytes(terms), budget_bytes):
        raise does_not_fit(terms, settings.batch_size, padded(longest - 1), budget_bytes)
    return total_bytes(terms)


def peak_of_run(model: ModelFiles, settings: TrainSettings, longest: int, backend: Backend) -> tuple[MemoryTerm, ...]:
    """The terms of the peak of a run with these settings whose longest row has ``longest`` tokens."""
    shape = Shape(settings.batch_size, padded(longest - 1), settings.gradient_accumulation > 1)
    return predicted_peak(model, settings.lora, shape, backend)


def require_trainable(method: str, *, packed: bool) -> None:
    """Raise ConfigError for full fine-tuning of packed weights."""
    if method == "full" and packed:
        raise ConfigError(
            "Packed weights cannot be trained in full.",
            do="train.method=lora or dora, or name the float model in model.path",
        )


def does_not_fit(
    terms: tuple[MemoryTerm, ...],
    batch_size: int,
    length: int,
    budget_bytes: int,
    factor: float = MARGIN,
    instead: Sequence[str] = (),
) -> MachineError:
    """What to say of a configuration that needs too much, and what would fit ``instead``."""
    needed = total_bytes(terms) * factor + PROCESS_BYTES
    usual = "a smaller or more strongly quantized model, or shorter rows (train.max_seq_length)"
    parts = ", ".join(f"{term.name} {term.size_bytes / GIB:.2f}" for term in terms)
    return MachineError(
        "This model and data do not fit this machine.",
        expected=f"at most {budget_bytes / GIB:.1f} GiB, the memory budget in machine.json",
        got=f"{needed / GIB:.1f} GiB with margin, at batch size {batch_size} and {length} tokens ({parts})",
        do=("lower train.batch_size, " if batch_size > 1 else "close other programs, or use ")
        + (" or ".join(instead) if instead else usual),
    )


def base_bytes(model: ModelFiles, backend: Backend) -> int:
    """Bytes of the base: as stored, or of every weight once unpacked."""
    if backend.dequantize_base or (backend.computes_in_float32 and model.quantization_bits is None):
        return model.parameters * (FLOAT32 if backend.computes_in_float32 else backend.compute_bytes)
    return model.static_bytes


def unpacked_bytes(model: ModelFiles, backend: Backend) -> int:
    """On CPU a packed base is unpacked at each use, in its own type and then in float32, in every part at work."""
    if backend.dequantize_base or not backend.computes_in_float32 or model.quantization_bits is None:
        return 0
    packed = {tensor.name.removesuffix(".scales") for tensor in model.tensors if tensor.name.endswith(".scales")}
    words = [math.prod(t.shape) for t in model.tensors if t.name.removesuffix(".weight") in packed]
    largest = max(words, default=0) * 32 // model.quantization_bits
    return min(MOST_PARTS, usable_cores()) * largest * (FLOAT32 + model.compute_bytes)


def trained_parameters(model: ModelFiles, lora: LoraSettings, method: str) -> int:
    """Numbers that are trained: the adapter, or all of the top blocks for full fine-tuning."""
    if method != "full":
        return lora_parameters(model, lora)
    lowest = model.num_layers - lora.num_layers
    found = [(LAYER_NAME.search(tensor.name), tensor.shape) for tensor in model.tensors]
    return sum(math.prod(shape) for name, shape in found if name is not None and int(name[1]) >= lowest)


def lora_parameters(model: ModelFiles, lora: LoraSettings) -> int:
    """Numbers in the adapter: rank x (inputs + outputs) of every matrix it is put on, each expert counted.

    From the names and shapes in the weight files; of a Llama block's seven matrices where these name no layers.
    """
    packed = {tensor.name.removesuffix(".scales") for tensor in model.tensors if tensor.name.endswith(".scales")}
    total = 0
    for tensor in model.tensors:
        found = LAYER_WEIGHT.search(tensor.name)
        if found is None or len(tensor.shape) < 2 or int(found[1]) < model.num_layers - lora.num_layers:
            continue
        if lora.targets != (ALL_LINEAR,) and not any(is_target(found[2], t) for t in lora.targets):
            continue
        *experts, outputs, inputs = tensor.shape
        if tensor.name.removesuffix(".weight") in packed:
            inputs = inputs * 32 // (model.quantization_bits or 32)
        copies = 1
        for count in experts:
            copies *= count
        total += lora.rank * copies * (inputs + outputs)
    return total or _llama_lora_parameters(model, lora)


def unknown_targets(model: ModelFiles, targets: tuple[str, ...]) -> list[str]:
    """Those of ``targets`` that no matrix in the weight files is called; none where these name no layers."""
    found = [match[2] for tensor in model.tensors if (match := LAYER_WEIGHT.search(tensor.name))]
    return [t for t in targets if found and not any(is_target(name, t) for name in found)]


def _llama_lora_parameters(model: ModelFiles, lora: LoraSettings) -> int:
    hidden, width = model.hidden_size, model.intermediate_size
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return lora.rank * lora.num_layers * ((hidden + query) * 2 + (hidden + key_value) * 2 + (hidden + width) * 3)


def activation_bytes(model: ModelFiles, shape: Shape, compute_bytes: int) -> int:
    """Bytes that one block with LoRA keeps for its backward pass, attention scores apart.

    Per token: the block's input, two norms, the attention's sum and output (5 hidden), queries and keys before and
    after rotation and values (2 query + 3 key/value), the attention's result (1 query), and gate, up, activated gate
    and product (4 feed-forward widths). The adapter multiplies in the stream's type, so it keeps no copies.
    """
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    numbers = 5 * model.hidden_size + 3 * query + 3 * key_value + 4 * model.intermediate_size
    return shape.rows * shape.tokens * numbers * compute_bytes


def adapter_activation_bytes(model: ModelFiles, lora: LoraSettings, shape: Shape, backend: Backend) -> int:
    """Bytes that a block's adapters keep beside: x A of each, dropped inputs with their masks, what DoRA scales."""
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, width = model.hidden_size, model.intermediate_size
    kept = 0 if backend.method == "full" else ADAPTED_LAYERS * lora.rank * backend.compute_bytes
    if lora.dropout and backend.method != "full":
        kept += (5 * hidden + query + width) * (backend.compute_bytes + 1)
    if backend.method == "dora":
        kept += (2 * hidden + query + 2 * key_value + 2 * width) * backend.compute_bytes
    return shape.rows * shape.tokens * kept


def score_bytes(model: ModelFiles, stored_blocks: int, shape: Shape, compute_bytes: int) -> int:
    """Attention probabilities: one stored copy in each trained block, and transient copies in the block at work.

    Queries are scored in tiles against the keys up to their own last, so about half of long rows' square is made.
    """
    tiles = [min(stop, shape.tokens) for stop in range(QUERY_TILE, shape.tokens + QUERY_TILE, QUERY_TILE)]
    scored = sum((stop - start) * stop for start, stop in itertools.pairwise([0, *tiles]))
    last = (tiles[-1] - ([0, *tiles])[-2]) * tiles[-1]
    one = model.num_heads * shape.rows * compute_bytes
    return int(one * (stored_blocks * scored + SCORE_COPIES_TRANSIENT * last))


def logit_bytes(model: ModelFiles, shape: Shape) -> int:
    """Logits are made for labels only, a chunk at a time; at worst every token is a label.

    A model that caps or scales them makes all at once.
    """
    if model.whole_logits:
        return WHOLE_LOGIT_COPIES * FLOAT32 * shape.rows * shape.tokens * model.vocab_size
    parts = min(MOST_PARTS, usable_cores())
    alive = CHUNKS_ALIVE * parts * chunk_tokens(model.vocab_size, parts)
    labels = min(shape.rows * shape.tokens, alive)
    return LOGIT_COPIES * FLOAT32 * labels * model.vocab_size

"""Memory of a run: predict mlx's peak, decide whether it fits, and set mlx's memory limit.

The prediction is arithmetic on a model's headers (core/memory/terms.py). The plan uses it to choose; ``train``, the
guard (on each rung of the memory ladder) and the training process use it to check.
(measured: benchmarks/bench_memory_accuracy.py, benchmarks/bench_memory_estimate.py)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.formatting import size_text
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.memory.terms import (
    FLOAT32,
    HEAD_SLICES,
    KEPT_BYTES,
    Setup,
    activation_bytes,
    base_bytes,
    dequantized_bytes,
    kept_score_bytes,
    labels_in_chunk,
    logit_bytes,
    matrix_bytes,
    optimizer_state_bytes,
    shards_of,
    slices_head,
    tiles_bytes,
    trained_parameters,
    width_of,
    with_factors,
    work_phases,
)
from safetrain.core.model.files import ModelFiles, in_blocks
from safetrain.core.model.shapes import FAMILIES
from safetrain.core.records.schema import PRETRAIN, WHOLE, rows_together
from safetrain.core.records.settings import EXACT, Recommendation, Shape, TrainSettings

# The factor on estimated terms; exact terms need none (measured on Linux CPU: the closed form is 7 to 35 % above the
# peak, benchmarks/bench_memory_estimate; published on Metal: 1.5 and 1.9 % above, MakazhanAlpamys/Soup #663).
MARGIN = 1.15
# Under a memory limit, mlx can run with this share of the estimated terms (benchmarks/bench_memory_accuracy: the closed
# form is 10 to 46 % above the minimum). A run that does not fit even then is not worth a dry run.
LEAST_SHARE = 0.7
OPTIMIZER_COPIES = 3  # copies of one block's numbers during its optimizer update (measured: 1.7 to 2.7)
OVERSTEP_SHARE = 0.02  # of the prediction: mlx exceeds its limit by one allocation
SLICES_ALIVE = 4  # of a head, in float32 (measured: 3.5 to 4.5)
SLICED_LOGITS = 2.25  # with the factor below, 1.1 of the logits of all labels: their gradients replace them
LONG_ROWS = 1.7  # of a large block's activations, with their gradients (measured: benchmarks/bench_stream)
# With the base on disk (engine/block_loop.py), factors on the estimated terms (measured: benchmarks/bench_stream). A
# memory limit bounds what mlx dequantizes ahead.
STREAMED = {
    "inputs of blocks": 1.05,
    "two blocks of the base": 1.0,
    "block in its backward pass": 1.0,  # without a limit, on a GPU, its gradients too
    "attention scores": 1.0,
    "a block's weights, dequantized": 1.0,
    "gradient": 1.0,
    "head of the base": 1.0,
    "head, dequantized": 1.0,
    "logits and loss": 0.5,  # of LOGIT_COPIES
    "logits of other shards": 0.5,
}


@dataclass(frozen=True)
class RunMemory:
    """The memory of mlx's allocator in a run, in bytes."""

    terms: dict[str, int]  # from the closed form
    peak_bytes: int
    needed_bytes: int  # the peak, plus a margin unless it is measured
    mlx_limit_bytes: int


def predicted_peak(run: Setup, shape: Shape) -> dict[str, int]:
    """The terms of the peak of mlx's allocator, in bytes; their sum is the prediction.

    The optimizer holds the gradient of all trained weights, and copies of one block's numbers; in pretraining, the
    embedding counts as a block.
    """
    trained = FLOAT32 * trained_parameters(run)
    exact = {} if run.settings.stream_base else {"base weights": base_bytes(run)}
    exact |= {"trained weights": trained, "optimizer's state": optimizer_state_bytes(run)}
    accumulates = shape.accumulates and not run.settings.stream_base
    accumulated = {"accumulated gradient": trained} if accumulates else {}
    phases = streamed_phases(run, shape) if run.settings.stream_base else work_phases(run, shape)
    embedding = matrix_bytes(run.model) if run.settings.method == PRETRAIN else 0
    block = max(trained / run.settings.lora.num_layers, embedding)
    optimizer = {"optimizer at work": trained + int(OPTIMIZER_COPIES * block)}
    return exact | max(*(accumulated | phase for phase in phases), optimizer, key=total_bytes)


def streamed_phases(run: Setup, shape: Shape) -> tuple[dict[str, int], ...]:
    """A step's temporary terms, with the base on disk, at its possible peaks: the loss and a block's backward pass.

    The inputs of blocks are kept for all rows that pass through a block together. One block is computed while the next
    is read.
    """
    model, shards = run.model, shards_of(run, shape)
    one = run.settings.lora.num_layers * model.hidden_size * run.number_bytes * shape.tokens
    kept = max(one, min(KEPT_BYTES, one * shape.update_tokens // shape.tokens))
    gradient, activations = FLOAT32 * trained_parameters(run), activation_bytes(run, shape)
    block, base_head = _parts_of_base(run)
    logits, head = logit_bytes(run, shape), matrix_bytes(model) if run.dequantizes_per_use else 0
    labels = shape.labels
    if head and slices_head(labels, model.hidden_size):
        logits = (
            int(SLICED_LOGITS * FLOAT32 * (labels + min(labels, labels_in_chunk(run))) * model.vocab_size) // shards
        )
        head = head // HEAD_SLICES * SLICES_ALIVE
    loss = {
        "inputs of blocks": kept,
        "head of the base": base_head,
        "head, dequantized": head,
        "logits and loss": logits,
        "logits of other shards": (shards - 1) * logits,
    }
    backward = {
        "inputs of blocks": kept,
        "two blocks of the base": 2 * block,
        "block in its backward pass": activations if run.on_cpu else 2 * activations,
        "attention scores": kept_score_bytes(model, shape) + tiles_bytes(run, shape),
        "a block's weights, dequantized": dequantized_bytes(run, shape),
        "gradient": gradient + shards * gradient // run.settings.lora.num_layers,
    }
    held = {name: backward[name] for name in ("inputs of blocks", "gradient")}
    long_rows = held | {"block in its backward pass": int(LONG_ROWS * activations)}  # all else has been freed
    return with_factors(STREAMED, loss, backward, long_rows)


def beyond_limit_bytes(run: Setup, shape: Shape) -> int:
    """How far a step with long rows exceeds any memory limit, with the base on disk.

    The limit is lower by as much; else mlx would compute ahead up to it, and exceed it by an allocation.
    """
    if not run.settings.stream_base:
        return 0
    *others, long_rows = map(total_bytes, streamed_phases(run, shape))
    return max(0, long_rows - max(others))


def _parts_of_base(run: Setup) -> tuple[int, int]:
    """Bytes in memory of the largest block and of the head: half of the weights outside blocks, all if tied.

    If the files name no blocks, all blocks count as equally large.
    """
    model, base, stored = run.model, base_bytes(run), _stored_bytes(run.model)
    share = base / max(1, sum(tensor.size_bytes for tensor in model.tensors))
    blocks = [int(size * share) for size in stored.values()] or [base // (model.num_layers + 1)] * model.num_layers
    outside = model.parameters - sum(tensor.weights for _, _, tensor in in_blocks(model))
    is_tied = outside < 1.5 * model.vocab_size * model.hidden_size
    return max(blocks, default=0), (base - sum(blocks)) // (1 if is_tied else 2)


def _stored_bytes(model: ModelFiles) -> Counter[int]:
    """Bytes of each block in the model's files, by block number."""
    sizes = Counter[int]()
    for block, _, tensor in in_blocks(model):
        sizes[block] += tensor.size_bytes
    return sizes


def read_bytes(run: Setup, shape: Shape) -> int:
    """Bytes that a step reads from disk: for each group of rows, all blocks forward and the trained blocks backward."""
    model, blocks, sizes = run.model, run.settings.lora.num_layers, _stored_bytes(run.model)
    tokens = max(shape.tokens, shape.update_tokens)
    together = max(shape.tokens, KEPT_BYTES // (blocks * model.hidden_size * run.number_bytes))
    passes = sum(size * (1 + (block >= model.num_layers - blocks)) for block, size in sizes.items())
    return -(-tokens // together) * (passes + model.static_bytes - sum(sizes.values()))


def total_bytes(terms: dict[str, int]) -> int:
    """Sum of the terms, in bytes."""
    return sum(terms.values())


def exact_bytes(terms: dict[str, int]) -> int:
    """Sum of the terms whose size is known, not estimated."""
    return sum(terms.get(name, 0) for name in EXACT)


def with_margin(terms: dict[str, int], factor: float = MARGIN) -> int:
    """The predicted peak to compare with a budget, in bytes of mlx's allocator.

    ``factor`` multiplies the estimated terms; exact terms need no margin.
    """
    total, exact = total_bytes(terms), exact_bytes(terms)
    return exact + int((total - exact) * factor)


def mlx_limit_bytes(peak_bytes: int, budget: MemoryBudget) -> int:
    """The value for mx.set_memory_limit: the smaller of the predicted peak and mlx's budget.

    It is not simply the budget, because mlx lets its memory grow up to the limit. A little is subtracted, because mlx
    exceeds its limit by one allocation.
    """
    most = min(peak_bytes, budget.mlx_bytes)
    return max(1, most - int(OVERSTEP_SHARE * most))


def largest_micro_batch(largest: Shape, batch_size: int, rows_per_update: int, *, rectangles: bool) -> Shape:
    """The largest micro-batch: as many tokens as ``batch_size`` of the longest rows, at most the whole update."""
    longest, more = width_of(largest.longest, rectangles=rectangles), max(1.0, rows_per_update / largest.rows)
    in_update = max(longest, int(more * largest.tokens))
    tokens = min(batch_size * longest, in_update)
    labels = min(tokens, int(more * largest.labels))
    rows = max(-(-tokens // longest), round(rows_per_update * tokens / in_update))  # of mean length
    return Shape(rows, longest, tokens, labels, in_update)


def memory_of_run(
    model: ModelFiles,
    settings: TrainSettings,
    largest: Shape,
    backend_name: str,
    budget: MemoryBudget,
    planned: Recommendation | None,
) -> RunMemory:
    """The memory of a run: as measured if the dry run covers it, else scaled from the dry run, or by the closed form.

    A dry run with the base in memory says nothing about a run with the base on disk.
    ``backend_name`` is cpu, metal, cuda or gpu. Raises ConfigError if model or backend do not support the settings.
    """
    require_trainable(settings.method, quantized=model.quantization_bits is not None)
    if model.max_positions is not None and settings.max_seq_length > model.max_positions:
        raise ConfigError(
            f"train.max_seq_length is {settings.max_seq_length}, longer than the model's context.",
            expected=f"at most {model.max_positions} tokens",
        )
    require_computable(settings.compute_dtype, backend_name)
    run = _largest_of(model, settings, largest, backend_name)
    terms, beyond = predicted_peak(*run), beyond_limit_bytes(*run)
    measured = planned.dry_run_peak_bytes if planned is not None else None
    if planned is None or measured is None or planned.settings.stream_base != settings.stream_base:
        peak, needed = total_bytes(terms), with_margin(terms)
        return RunMemory(terms, peak, needed, mlx_limit_bytes(peak - beyond, budget))
    # from one run to another, exact terms are exchanged, and the rest scales with the estimated terms
    then = predicted_peak(*_largest_of(model, planned.settings, planned.largest_update, backend_name))
    exact_then, exact = exact_bytes(then), exact_bytes(terms)
    estimated_then, estimated = total_bytes(then) - exact_then, total_bytes(terms) - exact
    share = estimated / estimated_then if estimated_then else 1.0
    peak = exact + int(max(0, measured - exact_then) * share)
    if planned.covers(settings, largest):  # the dry run ran the largest update of several row orders
        own = planned.measured
        peak = own.own_peak_bytes if own is not None and own.own_update == largest else min(peak, measured)
        peak = min(peak, budget.mlx_bytes)
    return RunMemory(terms, peak, peak, mlx_limit_bytes(peak - beyond, budget))


def in_rectangles(model: ModelFiles, backend_name: str) -> bool:
    """Whether rows are padded to rectangles: always on a GPU; on CPU only if packing is not known to work."""
    return backend_name != "cpu" or model.model_type not in FAMILIES


def require_fit(memory: RunMemory, settings: TrainSettings, largest: Shape, budget: MemoryBudget) -> None:
    """Raise MachineError if a run does not fit: the plan may not know settings from the command line."""
    if memory.needed_bytes > budget.mlx_bytes:
        raise does_not_fit(memory.terms, settings.batch_size, largest.longest, budget, memory.needed_bytes)


def _largest_of(model: ModelFiles, settings: TrainSettings, largest: Shape, backend_name: str) -> tuple[Setup, Shape]:
    rectangles = in_rectangles(model, backend_name)
    together = max(settings.batch_size, rows_together(settings.method))
    shape = largest_micro_batch(largest, together, settings.rows_per_update, rectangles=rectangles)
    return Setup(model, settings, backend_name), shape


def require_trainable(method: str, *, quantized: bool) -> None:
    """Raise ConfigError if a method would train quantized weights directly."""
    if method in WHOLE and quantized:
        raise ConfigError(
            "Quantized weights cannot be trained in full.",
            do="name a float model in model.path, or create one: model.path=models/new model.create=10m"
            if method == PRETRAIN
            else "train.method=lora or dora, or name the float model in model.path",
        )


def require_computable(compute_dtype: str | None, backend_name: str) -> None:
    """Raise ConfigError for a type that the backend does not compute in."""
    if backend_name == "cpu" and compute_dtype not in (None, "float32"):
        raise ConfigError(
            "A CPU computes everything in float32.",
            where="train.compute_dtype",
            expected="null or float32 on this machine",
            got=compute_dtype,
            do="set train.compute_dtype=null, which is right on every machine",
        )


def does_not_fit(
    terms: dict[str, int],
    batch_size: int,
    length: int,
    budget: MemoryBudget,
    needed_bytes: int,
    instead: Sequence[str] = ("a smaller or more strongly quantized model", "shorter rows (train.max_seq_length)"),
) -> MachineError:
    """The error for a configuration in which mlx needs ``needed_bytes``; ``instead``: changes that would fit."""
    large = {name: size for name, size in terms.items() if size > total_bytes(terms) / 50}
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in large.items())
    parts += f", Python and libraries {size_text(budget.process_bytes)}"
    whole = size_text(needed_bytes + budget.process_bytes)
    first = "lower train.batch_size, " if batch_size > 1 else "close other programs or raise train.memory_limit_gb, "
    return MachineError(
        "This model and data do not fit this machine.",
        expected=f"at most {size_text(budget.total_bytes)}, by machine.json and train.memory_limit_gb",
        got=f"{whole} with margin, at batch size {batch_size} and {length} tokens ({parts})",
        do=f"{first}or use {' or '.join(instead)}",
    )

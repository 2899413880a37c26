"""The memory terms of a training, computed from a model's headers; core/memory/estimate.py adds them up."""

import math
import os
from collections import Counter
from dataclasses import dataclass

from safetrain.core.model.files import ModelFiles, adapted_weights, in_blocks
from safetrain.core.records.schema import PRETRAIN, WHOLE
from safetrain.core.records.settings import ALL_LINEAR, LoraSettings, MemoryTerm, is_target

WIDTH_STEP = 32  # the engine pads rows to a multiple of this, which bounds the number of shapes
ADAPTED_LAYERS = 7  # most linear layers in a block
CHUNK_BYTES = 64 * 2**20  # logits, their softmax and their gradient in memory at one time
MIN_CHUNK_TOKENS = 32
MOST_SHARDS = 4  # most shards of a micro-batch computed in parallel on CPU; each has its own chunk
MOST_GRADIENT_BYTES = 2**30  # gradients of all shards in pretraining; a larger model has one shard
MATRIX_COPIES = 3  # of a trained head's gradient: the sum, the current chunk's, the previous chunk's
LOGIT_COPIES = 5  # float32 numbers per logit alive in a chunk (measured: 4 to 5)
WHOLE_LOGIT_COPIES = 10  # including copies for capping and gathering (measured: 9.8)
CHUNKS_ALIVE = 2  # mlx starts the next chunk before it frees the previous one (measured)
OWN_ATTENTION, OWN_SCORE_COPIES = ("gemma2",), 3  # mlx_lm/models/gemma2.py (measured: bench_memory_estimate)
TILES_ALIVE = 2  # at least: one of scores, one of their gradients
FLOAT32 = 4
NUMBER_BYTES = {"float32": FLOAT32, "bfloat16": 2, "float16": 2}
FLOATS = ("F32", "F16", "BF16")  # names in the headers of weight files
KEPT_NUMBERS = {"adam": 2, "adamw": 2, "muon": 1, "sgd": 1}  # numbers that the optimizer keeps per trained number
LEAST_WIDTH = 64  # smallest width of a model's matrices
# Of a weight that a CPU dequantizes at each use, a slice of rows in float32; more where rows are long (bench_cpu)
DEQUANTIZED_BYTES, LEAST_DEQUANTIZED_ROWS = 2**23, 256


@dataclass(frozen=True)
class Tiles:
    """The size of the tiles in which attention scores are computed."""

    most_queries: int
    short_queries: int  # for rows of at most ``most_queries``: half of a diagonal tile is wasted work
    most_bytes: int  # scores of one tile, or of one key head if that is more

    def queries(self, width: int) -> int:
        """Queries of a row in one tile."""
        return min(width, self.short_queries if width <= self.most_queries else self.most_queries)

    def lines(self, groups: int, width: int, number_bytes: int) -> int:
        """Key heads, over all rows, in one tile; each serves ``groups`` query heads."""
        return max(1, self.most_bytes // (groups * self.queries(width) * width * number_bytes))


# A GPU needs few tiles (a dozen kernels each), a CPU few wasted scores (measured: benchmarks/bench_attention).
CPU_TILES, GPU_TILES = Tiles(128, 64, 8 * 2**20), Tiles(512, 512, 16 * 2**20)
# mlx's own backward pass on Metal has tiles over all heads and rows, up to these bytes, or one row's if that is more
# (read from mlx-metal 0.32.4). CUDA has no such kernel: the tiles above are used.
METAL_TILES_ALIVE, METAL_QUERIES, MOST_METAL_BYTES = 3, 1024, 256 * 2**20
METAL_HEAD_SIZES = (64, 72, 80, 96, 128, 192, 256, 512)  # 512 on some GPUs


@dataclass(frozen=True)
class Shape:
    """The shape of a micro-batch: rows, tokens of the longest row with padding, and whether gradients accumulate."""

    rows: int
    tokens: int
    accumulates: bool
    all_tokens: int = 0  # total of all rows; 0: every row is as long as the longest
    labels: int | None = None  # total of all rows; None: every token is a label
    update_tokens: int = 0  # of all micro-batches; 0: unknown

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return self.all_tokens or self.rows * self.tokens


# The factor on each estimated term, chosen conservatively (measured: benchmarks/bench_memory_estimate)
COEFFICIENTS = {
    "stored activations": 1.15,  # kept by blocks for the backward pass; only block inputs if recomputed
    "attention scores": 1.3,
    "block in its backward pass": 2.0,  # its activations and their gradients
    "logits and loss": 1.3,  # of one shard of a micro-batch
    "logits of other shards": 1.0,  # computed at the same time
    "head, dequantized": 1.0,  # shared by all shards
    "gradient of the head": 1.0,  # of a trained head, for each shard
    "gradient so far": 0.5,  # while the loss is computed
    "a block's weights, dequantized": 1.5,
    "gradient": 1.2,
}


@dataclass(frozen=True)
class Backend:
    """Where and how a training computes, as far as the estimate depends on it."""

    compute_bytes: int  # of one number in the residual stream
    dequantize_base: bool
    computes_in_float32: bool  # CPU: dequantized weights become float32
    method: str = "lora"
    checkpointing: bool = False
    optimizer: str = "adam"
    compute_dtype: str | None = None  # to which a GPU casts the base; None: the stored type
    metal_attention: bool = False  # mlx's own kernel, in both passes
    stream_base: bool = False  # the base stays on disk


def backend_of(
    model: ModelFiles,
    name: str,
    dequantize_base: bool,
    method: str = "lora",
    *,
    checkpointing: bool = False,
    optimizer: str = "adam",
    compute_dtype: str | None = None,
    stream_base: bool = False,
) -> Backend:
    """The backend called cpu, metal or cuda, for this model."""
    compute_dtype = None if name == "cpu" else compute_dtype
    compute_bytes = NUMBER_BYTES[compute_dtype] if compute_dtype else model.compute_bytes
    cast = method == PRETRAIN and compute_dtype is not None  # for each pass; the weights stay float32
    if name == "cpu" or (method in WHOLE and not cast):
        compute_bytes = FLOAT32
    return Backend(
        compute_bytes, dequantize_base, name == "cpu", method, checkpointing,
        optimizer=optimizer, compute_dtype=compute_dtype,
        metal_attention=name == "metal" and model.head_dim in METAL_HEAD_SIZES, stream_base=stream_base,
    )  # fmt: skip


def usable_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def padded(tokens: int) -> int:
    """Tokens of a row after padding."""
    return -(-tokens // WIDTH_STEP) * WIDTH_STEP


def chunk_tokens(vocabulary: int, shards: int = 1) -> int:
    """Labels in one chunk of logits, if ``shards`` shards run at the same time."""
    return max(MIN_CHUNK_TOKENS, CHUNK_BYTES // (shards * CHUNKS_ALIVE * LOGIT_COPIES * FLOAT32 * vocabulary))


def work_phases(
    model: ModelFiles, lora: LoraSettings, shape: Shape, backend: Backend
) -> tuple[tuple[MemoryTerm, ...], ...]:
    """The temporary terms of a step at the three moments that can be the peak: the loss is computed, the top block's
    backward pass, the lowest trained block's backward pass.

    At the loss and at the top block, the activations of all blocks are in memory; with recomputation only the inputs
    of all blocks and the activations of one. Each shard has its own gradient. (measured: timelines of mlx memory)
    """
    block = activation_bytes(model, shape, backend.compute_bytes)
    block += adapter_activation_bytes(model, lora, shape, backend)
    one = shape.total * model.hidden_size * backend.compute_bytes if backend.checkpointing else block
    scores, tiles = kept_score_bytes(model, shape), tiles_bytes(model, shape, backend)
    shards, blocks = shards_of(model, shape, backend), lora.num_layers
    gradient = FLOAT32 * trained_parameters(model, lora, backend.method)
    logits, all_kept = logit_bytes(model, shape, backend), 0 if backend.checkpointing else blocks * scores
    is_whole = backend.method == PRETRAIN  # at the loss, only the head's gradient exists
    loss = {
        "stored activations": blocks * one,
        "attention scores": all_kept,
        "logits and loss": logits,
        "logits of other shards": (shards - 1) * logits,
        "gradient of the head": shards * MATRIX_COPIES * matrix_bytes(model) if is_whole else 0,
        "gradient so far": 0 if is_whole else gradient,
    }
    backward = {
        "block in its backward pass": block,
        "a block's weights, dequantized": dequantized_bytes(model, shape, backend),
    }
    top = {
        "stored activations": blocks * one,
        "attention scores": max(all_kept, scores) + tiles,
        "gradient": shards * gradient // blocks,
    }
    bottom = {"stored activations": one, "attention scores": scores + tiles, "gradient": shards * gradient}
    result = []
    for sizes in (loss, backward | top, backward | bottom):
        sizes["head, dequantized"] = head_bytes(model, backend)
        scaled = ((name, int(sizes.get(name, 0) * factor)) for name, factor in COEFFICIENTS.items())
        result.append(tuple(MemoryTerm(name, size) for name, size in scaled if size))
    return tuple(result)


def shards_of(model: ModelFiles, shape: Shape, backend: Backend) -> int:
    """Shards of a micro-batch that are computed at the same time; windows can be split for all shards."""
    if backend.method == PRETRAIN:
        most = shards_at_once(MOST_SHARDS, on_cpu=backend.computes_in_float32)
        return min(most, most_shards_of_whole(model.parameters))
    return shards_at_once(shape.rows, on_cpu=backend.computes_in_float32)


def most_shards_of_whole(parameters: int) -> int:
    """Most shards in pretraining: each has a gradient as large as the model."""
    return max(1, MOST_GRADIENT_BYTES // (FLOAT32 * parameters))


def matrix_bytes(model: ModelFiles) -> int:
    """Size of the embedding, or of the head, in float32."""
    return FLOAT32 * model.vocab_size * model.hidden_size


def shards_at_once(rows: int, *, on_cpu: bool) -> int:
    """Parallel shards: on CPU one per core, but at most one per row; on a GPU one."""
    return min(MOST_SHARDS, usable_cores(), rows) if on_cpu else 1


def dequantizes_per_use(model: ModelFiles, backend: Backend) -> bool:
    """Whether weights are dequantized at each use: on CPU, if the base stays quantized."""
    return backend.computes_in_float32 and not backend.dequantize_base and model.quantization_bits is not None


def head_bytes(model: ModelFiles, backend: Backend) -> int:
    """Size of the dequantized float32 head, which all shards of a micro-batch share."""
    return matrix_bytes(model) if dequantizes_per_use(model, backend) else 0


def rows_dequantized_together(inputs: int) -> int:
    """Rows of a weight that a CPU dequantizes and multiplies before it dequantizes the next ones."""
    return max(LEAST_DEQUANTIZED_ROWS, DEQUANTIZED_BYTES // (FLOAT32 * inputs))


def dequantized_bytes(model: ModelFiles, shape: Shape, backend: Backend) -> int:
    """Size of one block's dequantized weights for all shards: a slice of each matrix, but experts as a whole."""
    if not dequantizes_per_use(model, backend):
        return 0
    blocks = Counter[int]()  # in a mixture of experts, the first blocks may have none
    for block, _, tensor in in_blocks(model):
        if tensor.bits:
            *experts, _, inputs = tensor.dequantized_shape
            slice_weights = rows_dequantized_together(inputs) * inputs
            blocks[block] += tensor.weights if experts else min(tensor.weights, slice_weights)
    return shards_of(model, shape, backend) * FLOAT32 * max(blocks.values(), default=0)


def base_bytes(model: ModelFiles, backend: Backend) -> int:
    """Bytes of the base: as stored or cast, scales and biases of quantized weights included, or all dequantized."""
    if backend.method == PRETRAIN:  # the trained weights are the model; a GPU casts them for each pass
        return 0 if backend.compute_bytes == FLOAT32 else backend.compute_bytes * model.parameters
    if backend.dequantize_base or (backend.computes_in_float32 and model.quantization_bits is None):
        return model.parameters * (FLOAT32 if backend.computes_in_float32 else backend.compute_bytes)
    if backend.compute_dtype is None:
        return model.static_bytes
    number = NUMBER_BYTES[backend.compute_dtype]
    floats = [tensor for tensor in model.tensors if tensor.dtype in FLOATS]
    return model.static_bytes + sum(number * math.prod(each.shape) - each.size_bytes for each in floats)


def trained_parameters(model: ModelFiles, lora: LoraSettings, method: str) -> int:
    """Count of trained numbers: the adapter, the top blocks (full fine-tuning), or the whole model (pretraining)."""
    if method == PRETRAIN:
        return model.parameters
    if method != "full":
        return lora_parameters(model, lora, with_lengths=method == "dora")
    lowest = model.num_layers - lora.num_layers
    return sum(tensor.weights for block, _, tensor in in_blocks(model) if block >= lowest)


def optimizer_state_bytes(model: ModelFiles, lora: LoraSettings, backend: Backend) -> int:
    """Size of the optimizer's state (mlx/optimizers/optimizers.py: ``init_single``).

    Adam keeps two moments per number, SGD and Muon one. In pretraining with Muon, everything except the matrices of
    blocks is trained with Adam (engine/optimizer.py). Adafactor keeps a mean for each row and column of a matrix: for
    an adapter about one number in ``rank``.
    """
    trained = trained_parameters(model, lora, backend.method)
    if backend.optimizer != "adafactor":
        numbers = KEPT_NUMBERS[backend.optimizer] * trained
        if backend.optimizer == "muon" and backend.method == PRETRAIN:
            numbers += trained - sum(each.weights for _, _, each in in_blocks(model) if len(each.shape) == 2)
    else:
        numbers = trained // (LEAST_WIDTH // 2 if backend.method in WHOLE else lora.rank) + trained // LEAST_WIDTH
    return FLOAT32 * numbers


def lora_parameters(model: ModelFiles, lora: LoraSettings, *, with_lengths: bool = False) -> int:
    """Count of numbers in the adapter: rank x (inputs + outputs) of every target matrix, experts included; for DoRA
    also a length for each output.
    """
    total = 0
    for block, name, weight in adapted_weights(model):
        if block < model.num_layers - lora.num_layers:
            continue
        if lora.targets != (ALL_LINEAR,) and not any(is_target(name, t) for t in lora.targets):
            continue
        *experts, outputs, inputs = weight.dequantized_shape
        total += math.prod(experts) * (lora.rank * (inputs + outputs) + with_lengths * outputs)
    return total


def unknown_targets(model: ModelFiles, targets: tuple[str, ...]) -> list[str]:
    """The ``targets`` that match no matrix in the weight files; empty if the files name no layers."""
    names = [name for _, name, _ in adapted_weights(model)]
    return [t for t in targets if names and not any(is_target(name, t) for name in names)]


def activation_bytes(model: ModelFiles, shape: Shape, compute_bytes: int) -> int:
    """Bytes that one block with LoRA keeps for its backward pass, without attention scores.

    Per token: the block's input, two norms, the attention's sum and output (5 hidden), queries and keys before and
    after rotation and values (2 query + 3 key/value), the attention's result (1 query), and gate, up, activated gate
    and product (4 feed-forward widths). The adapter multiplies in the stream's type, so it keeps no copies.
    """
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    numbers = 5 * model.hidden_size + 3 * query + 3 * key_value + 4 * model.intermediate_size
    return shape.total * numbers * compute_bytes


def adapter_activation_bytes(model: ModelFiles, lora: LoraSettings, shape: Shape, backend: Backend) -> int:
    """Bytes that a block's adapters keep: x A of each; with dropout, inputs and masks; with DoRA, scaled outputs."""
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, width = model.hidden_size, model.intermediate_size
    token_bytes = 0 if backend.method in WHOLE else ADAPTED_LAYERS * lora.rank * backend.compute_bytes
    if lora.dropout and backend.method not in WHOLE:
        token_bytes += (5 * hidden + query + width) * (backend.compute_bytes + 1)
    if backend.method == "dora":
        token_bytes += (2 * hidden + query + 2 * key_value + 2 * width) * backend.compute_bytes
    return shape.total * token_bytes


def kept_score_bytes(model: ModelFiles, shape: Shape) -> int:
    """Bytes that a block keeps of its scores: one float32 per query and head, to recompute them later.

    Models with their own attention (gemma2) keep whole score matrices: capped, masked, and as probabilities.
    """
    if model.model_type in OWN_ATTENTION:
        return OWN_SCORE_COPIES * FLOAT32 * model.num_heads * shape.total * shape.tokens
    return FLOAT32 * model.num_heads * shape.total


def tiles_bytes(model: ModelFiles, shape: Shape, backend: Backend) -> int:
    """Size of the score tiles and their gradients that a backward pass holds in all shards.

    mlx's own kernel on Metal also holds the gradients of queries, keys and values in float32.
    """
    groups, width = model.num_heads // model.num_kv_heads, shape.tokens
    if backend.metal_attention:
        row = metal_row_bytes(model.num_heads, width, backend.compute_bytes)
        gradients = shape.total * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        return max(row, min(MOST_METAL_BYTES, row * shape.total // width)) + FLOAT32 * gradients
    shards, tiles = shards_of(model, shape, backend), CPU_TILES if backend.computes_in_float32 else GPU_TILES
    lines = tiles.lines(groups, width, backend.compute_bytes)
    lines = min(lines, -(-model.num_kv_heads * shape.total // (shards * width)))
    return TILES_ALIVE * shards * lines * groups * tiles.queries(width) * width * backend.compute_bytes


def metal_row_bytes(heads: int, width: int, number_bytes: int) -> int:
    """Size of a row's tiles in mlx's own backward pass on Metal."""
    return METAL_TILES_ALIVE * heads * min(METAL_QUERIES, width) ** 2 * number_bytes


def logit_bytes(model: ModelFiles, shape: Shape, backend: Backend) -> int:
    """Size of one shard's logits, computed for labels only, a chunk at a time; at worst every token is a label.

    A model whose head cannot be called separately (``whole_logits``) computes the logits of all tokens at once.
    """
    shards = shards_of(model, shape, backend)
    if model.whole_logits:
        return WHOLE_LOGIT_COPIES * FLOAT32 * shape.total // shards * model.vocab_size
    labels = (shape.total if shape.labels is None else shape.labels) // shards
    most_shards = shards_at_once(MOST_SHARDS, on_cpu=backend.computes_in_float32)
    alive = CHUNKS_ALIVE * chunk_tokens(model.vocab_size, most_shards)
    return LOGIT_COPIES * FLOAT32 * min(labels, alive) * model.vocab_size

"""The memory terms of a training run, computed from a model's headers; core/memory/estimate.py adds them up."""

import math
import os
from collections import Counter
from dataclasses import dataclass

import numpy as np

from safetrain.core.model.files import ModelFiles, adapted_weights, in_blocks
from safetrain.core.model.shapes import TYPE_BYTES, TYPES
from safetrain.core.records.schema import PRETRAIN, WHOLE
from safetrain.core.records.settings import ALL_LINEAR, FEWEST_LABELS, LoraSettings, Shape, TrainSettings, is_target

THREADS = "OPENBLAS_NUM_THREADS"  # environment variable: threads of matrix products on a CPU
WIDTH_STEP = 32  # the engine pads rows to a multiple of this, which bounds the number of shapes
ADAPTED_LAYERS = 7  # most linear layers in a block
CHUNK_BYTES = 64 * 2**20  # logits, their softmax and their gradient in memory at one time
MOST_SHARDS = 4  # most shards of a micro-batch computed in parallel on CPU; each has its own chunk
MOST_GRADIENT_BYTES = 2**30  # gradients of all shards in pretraining; a larger model has one shard
MATRIX_COPIES = 3  # of a trained head's gradient: the sum, the current chunk's, the previous chunk's
LOGIT_COPIES = 5  # float32 numbers per logit alive in a chunk (measured: 4 to 5)
WHOLE_LOGIT_COPIES = 10  # including copies for capping and gathering (measured: 9.8)
CHUNKS_ALIVE = 2  # mlx starts the next chunk before it frees the previous one (measured)
OWN_ATTENTION, OWN_SCORE_COPIES = ("gemma2",), 3  # mlx_lm/models/gemma2.py (measured: bench_memory_estimate)
TILES_ALIVE = 2  # at least: one of scores, one of their gradients
FLOAT32 = 4
KEPT_NUMBERS = {"adam": 2, "adamw": 2, "muon": 1}  # numbers that the optimizer keeps per trained number
# With the base on disk (engine/block_loop.py)
KEPT_BYTES = 2**28  # most block inputs kept between the passes; with more, the blocks are read again
HEAD_SLICES = 32  # slices in which the engine dequantizes a head
# A CPU dequantizes a weight at each use in slices: so many bytes of float32, but at least so many rows (bench_cpu)
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
        """Number of key heads, over all rows, in one tile; each serves ``groups`` query heads."""
        return max(1, self.most_bytes // (groups * self.queries(width) * width * number_bytes))


# A GPU needs few tiles (a dozen kernels each), a CPU few wasted scores (measured: benchmarks/bench_attention).
CPU_TILES, GPU_TILES = Tiles(128, 64, 8 * 2**20), Tiles(512, 512, 16 * 2**20)
# mlx's own backward pass on Metal has tiles over all heads and rows, up to these bytes, or one row's if that is more
# (read from mlx-metal 0.32.4). On CUDA the tiles above are assumed: its kernel takes less.
METAL_TILES_ALIVE, METAL_QUERIES, MOST_METAL_BYTES = 3, 1024, 256 * 2**20
CUDA_WIDTH = 128  # row widths of cuDNN's gradient: multiples (mlx 0.32.4, ScaledDotProductAttentionVJP::use_fallback)
METAL_HEAD_SIZES = (64, 72, 80, 96, 128, 192, 256, 512)  # 512 on some GPUs


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
class Setup:
    """The parts of a training run that decide its memory."""

    model: ModelFiles
    settings: TrainSettings
    backend: str  # cpu, metal, cuda or gpu

    @property
    def on_cpu(self) -> bool:
        """Whether a CPU computes; it uses float32 for everything, dequantized weights included."""
        return self.backend == "cpu"

    @property
    def cast_dtype(self) -> str | None:
        """The type to which a GPU casts the base (in pretraining, for each forward pass); None: the stored type."""
        return None if self.on_cpu else self.settings.compute_dtype

    @property
    def number_bytes(self) -> int:
        """Bytes of one number in the residual stream."""
        method = self.settings.method
        if self.on_cpu or (method in WHOLE and not (method == PRETRAIN and self.cast_dtype)):
            return FLOAT32
        return TYPE_BYTES[TYPES[self.cast_dtype]] if self.cast_dtype else self.model.compute_bytes

    @property
    def dequantizes_per_use(self) -> bool:
        """Whether weights are dequantized at each use: on CPU, if the base stays quantized."""
        return self.on_cpu and not self.settings.dequantize_base and self.model.quantization_bits is not None


def usable_cores() -> int:
    """Processor cores that this process may use; at most OPENBLAS_NUM_THREADS, which a user may set."""
    cores, own = os.cpu_count() or 1, os.environ.get(THREADS, "")
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(own))) if own.isdecimal() else cores


def width_of(tokens: int, *, rectangles: bool) -> int:
    """Tokens that a micro-batch has room for per row of ``tokens`` tokens: in rectangles, the row's padded width."""
    return int(widths_of(np.array(tokens))) if rectangles else -(-tokens // WIDTH_STEP) * WIDTH_STEP


def widths_of(lengths: np.ndarray) -> np.ndarray:
    """Padded widths of rows in rectangles: multiples of WIDTH_STEP; long rows have up to an eighth of padding."""
    doublings = np.frexp(np.maximum(lengths - 1, 1))[1]  # exponent of the least power of two that holds a row
    step = np.maximum(WIDTH_STEP, 2 ** np.maximum(doublings - 4, 0))
    return -(-np.asarray(lengths, dtype=np.int64) // step) * step


def chunk_tokens(vocabulary: int, shards: int = 1, least: int = FEWEST_LABELS) -> int:
    """Labels in one chunk of logits, if ``shards`` shards run at the same time: CHUNK_BYTES, but ``least`` labels."""
    return max(least, CHUNK_BYTES // (shards * CHUNKS_ALIVE * LOGIT_COPIES * FLOAT32 * vocabulary))


def labels_in_chunk(run: Setup) -> int:
    """Labels in one chunk of logits, if the largest number of shards runs at the same time."""
    shards = shards_at_once(MOST_SHARDS, on_cpu=run.on_cpu)
    return chunk_tokens(run.model.vocab_size, shards, run.settings.labels_at_once)


def work_phases(run: Setup, shape: Shape) -> tuple[dict[str, int], ...]:
    """The temporary terms of a step at the three moments that can be the peak: the loss, the top block's backward
    pass, and the lowest trained block's backward pass.

    At the loss and at the top block, the activations of all blocks are in memory; with recomputation only the inputs
    of all blocks and the activations of one. Each shard has its own gradient. (measured: timelines of mlx memory)
    """
    block, shards, blocks = activation_bytes(run, shape), shards_of(run, shape), run.settings.lora.num_layers
    one = shape.tokens * run.model.hidden_size * run.number_bytes if run.settings.gradient_checkpointing else block
    scores, tiles = kept_score_bytes(run.model, shape), tiles_bytes(run, shape)
    gradient, logits = FLOAT32 * trained_parameters(run), logit_bytes(run, shape)
    all_kept = 0 if run.settings.gradient_checkpointing else blocks * scores
    is_whole = run.settings.method == PRETRAIN  # at the loss, only the head's gradient exists
    always = {"head, dequantized": matrix_bytes(run.model) if run.dequantizes_per_use else 0}
    loss = {
        "stored activations": blocks * one,
        "attention scores": all_kept,
        "logits and loss": logits,
        "logits of other shards": (shards - 1) * logits,
        "gradient of the head": shards * MATRIX_COPIES * matrix_bytes(run.model) if is_whole else 0,
        "gradient so far": 0 if is_whole else gradient,
    }
    backward = always | {
        "block in its backward pass": block,
        "a block's weights, dequantized": dequantized_bytes(run, shape),
    }
    top = {
        "stored activations": blocks * one,
        "attention scores": max(all_kept, scores) + tiles,
        "gradient": shards * gradient // blocks,
    }
    bottom = {"stored activations": one, "attention scores": scores + tiles, "gradient": shards * gradient}
    return with_factors(COEFFICIENTS, always | loss, backward | top, backward | bottom)


def with_factors(factors: dict[str, float], *phases: dict[str, int]) -> tuple[dict[str, int], ...]:
    """The terms of each phase, in the order of ``factors``, without those of size 0."""
    scaled = [{name: int(sizes.get(name, 0) * factor) for name, factor in factors.items()} for sizes in phases]
    return tuple({name: size for name, size in phase.items() if size} for phase in scaled)


def shards_of(run: Setup, shape: Shape) -> int:
    """Shards of a micro-batch that are computed at the same time; windows can be split, so their number is no limit."""
    if run.settings.method == PRETRAIN:
        return min(shards_at_once(MOST_SHARDS, on_cpu=run.on_cpu), most_shards_of_whole(run.model.parameters))
    return shards_at_once(shape.rows, on_cpu=run.on_cpu)


def most_shards_of_whole(parameters: int) -> int:
    """Maximum number of shards in pretraining: each has a gradient as large as the model."""
    return max(1, MOST_GRADIENT_BYTES // (FLOAT32 * parameters))


def matrix_bytes(model: ModelFiles) -> int:
    """Bytes of the embedding in float32; the head is equally large."""
    return FLOAT32 * model.vocab_size * model.hidden_size


def shards_at_once(rows: int, *, on_cpu: bool) -> int:
    """Parallel shards: one on a GPU; on CPU one per core, but at most one per row and at most MOST_SHARDS."""
    return min(MOST_SHARDS, usable_cores(), rows) if on_cpu else 1


def slices_head(labels: int, width: int) -> bool:
    """Whether the logits of ``labels`` labels, with gradients, take less memory than a float32 head of this width."""
    return 2 * labels < width


def rows_dequantized_together(inputs: int) -> int:
    """Rows of a weight that a CPU dequantizes and multiplies before it dequantizes the next ones."""
    return max(LEAST_DEQUANTIZED_ROWS, DEQUANTIZED_BYTES // (FLOAT32 * inputs))


def dequantized_bytes(run: Setup, shape: Shape) -> int:
    """Size of one block's dequantized weights for all shards: a slice of each matrix, but experts as a whole."""
    blocks = Counter[int]()  # in a mixture of experts, the first blocks may have no experts
    for block, _, tensor in in_blocks(run.model):
        if tensor.bits and run.dequantizes_per_use:
            *experts, _, inputs = tensor.dequantized_shape
            slice_weights = rows_dequantized_together(inputs) * inputs
            blocks[block] += tensor.weights if experts else min(tensor.weights, slice_weights)
    return shards_of(run, shape) * FLOAT32 * max(blocks.values(), default=0)


def base_bytes(run: Setup) -> int:
    """Bytes of the base: as stored or cast (with the scales and biases of quantized weights), or fully dequantized."""
    model, number = run.model, run.number_bytes
    if run.settings.method == PRETRAIN:  # the trained weights are the model; a GPU casts them for each pass
        return 0 if number == FLOAT32 else number * model.parameters
    if run.settings.dequantize_base or (run.on_cpu and model.quantization_bits is None):
        return model.parameters * number
    if run.cast_dtype is None:
        return model.static_bytes
    floats = [tensor for tensor in model.tensors if tensor.dtype in TYPES.values()]
    cast = TYPE_BYTES[TYPES[run.cast_dtype]]
    return model.static_bytes + sum(cast * math.prod(each.shape) - each.size_bytes for each in floats)


def trained_parameters(run: Setup) -> int:
    """Count of trained numbers: the adapter, the top blocks (full fine-tuning), or the whole model (pretraining)."""
    if run.settings.method == PRETRAIN:
        return run.model.parameters
    if run.settings.method != "full":
        return lora_parameters(run.model, run.settings.lora, with_lengths=run.settings.method == "dora")
    lowest = run.model.num_layers - run.settings.lora.num_layers
    return sum(tensor.weights for block, _, tensor in in_blocks(run.model) if block >= lowest)


def optimizer_state_bytes(run: Setup) -> int:
    """Size of the optimizer's state (mlx/optimizers/optimizers.py: ``init_single``).

    Adam keeps two moments per number, Muon one. In pretraining with Muon, everything except the matrices of blocks is
    trained with Adam (engine/optimizer.py).
    """
    trained = trained_parameters(run)
    numbers = KEPT_NUMBERS[run.settings.optimizer] * trained
    if run.settings.optimizer == "muon" and run.settings.method == PRETRAIN:
        numbers += trained - sum(each.weights for _, _, each in in_blocks(run.model) if len(each.shape) == 2)
    return FLOAT32 * numbers


def lora_parameters(model: ModelFiles, lora: LoraSettings, *, with_lengths: bool = False) -> int:
    """Count of numbers in the adapter: rank x (inputs + outputs) of every target matrix, experts included; for DoRA
    also a length for each output.
    """
    total, is_all = 0, lora.targets == (ALL_LINEAR,)
    for block, name, weight in adapted_weights(model):
        is_trained = block >= model.num_layers - lora.num_layers
        if is_trained and (is_all or any(is_target(name, target) for target in lora.targets)):
            *experts, outputs, inputs = weight.dequantized_shape
            total += math.prod(experts) * (lora.rank * (inputs + outputs) + with_lengths * outputs)
    return total


def activation_bytes(run: Setup, shape: Shape) -> int:
    """Bytes that one block with its adapters keeps for its backward pass, without attention scores.

    Per token: the block's input, two norms, the attention's sum and output (5 hidden), queries and keys before and
    after rotation and values (2 query + 3 key/value), the attention's result (1 query), and gate, up, activated gate
    and product (4 feed-forward widths). The adapters multiply in the stream's type, so they keep no copies, only x A of
    each; with dropout, inputs and masks; with DoRA, scaled outputs.
    """
    model, number = run.model, run.number_bytes
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, width = model.hidden_size, model.intermediate_size
    token_bytes = (5 * hidden + 3 * query + 3 * key_value + 4 * width) * number
    if run.backend == "cuda":  # attention takes copies with more padding
        token_bytes += 2 * (query + key_value) * number * (-shape.longest % CUDA_WIDTH) // shape.longest
    if run.settings.method not in WHOLE:
        token_bytes += ADAPTED_LAYERS * run.settings.lora.rank * number
        token_bytes += (5 * hidden + query + width) * (number + 1) if run.settings.lora.dropout else 0
    if run.settings.method == "dora":
        token_bytes += (2 * hidden + query + 2 * key_value + 2 * width) * number
    return shape.tokens * token_bytes


def kept_score_bytes(model: ModelFiles, shape: Shape) -> int:
    """Bytes that a block keeps of its attention scores: one float32 per query and head, to recompute them later.

    Models with their own attention (gemma2) keep whole score matrices: capped, masked, and as probabilities.
    """
    if model.model_type in OWN_ATTENTION:
        return OWN_SCORE_COPIES * FLOAT32 * model.num_heads * shape.tokens * shape.longest
    return FLOAT32 * model.num_heads * shape.tokens


def tiles_bytes(run: Setup, shape: Shape) -> int:
    """Size of the score tiles and their gradients that a backward pass holds in all shards.

    mlx's own kernel on Metal, for both passes, also holds the gradients of queries, keys and values in float32.
    """
    model, number, width = run.model, run.number_bytes, shape.longest
    groups = model.num_heads // model.num_kv_heads
    if run.backend == "metal" and model.head_dim in METAL_HEAD_SIZES:
        row = metal_row_bytes(model.num_heads, width, number)
        gradients = shape.tokens * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        return max(row, min(MOST_METAL_BYTES, row * shape.tokens // width)) + FLOAT32 * gradients
    shards, tiles = shards_of(run, shape), CPU_TILES if run.on_cpu else GPU_TILES
    lines = min(tiles.lines(groups, width, number), -(-model.num_kv_heads * shape.tokens // (shards * width)))
    return TILES_ALIVE * shards * lines * groups * tiles.queries(width) * width * number


def metal_row_bytes(heads: int, width: int, number_bytes: int) -> int:
    """Size of a row's tiles in mlx's own backward pass on Metal."""
    return METAL_TILES_ALIVE * heads * min(METAL_QUERIES, width) ** 2 * number_bytes


def logit_bytes(run: Setup, shape: Shape) -> int:
    """Size of one shard's logits, computed for labels only, a chunk at a time; at worst every token is a label.

    A model whose head cannot be called separately (``whole_logits``) computes the logits of all tokens at once.
    """
    shards, vocabulary = shards_of(run, shape), run.model.vocab_size
    if run.model.whole_logits:
        return WHOLE_LOGIT_COPIES * FLOAT32 * shape.tokens // shards * vocabulary
    return LOGIT_COPIES * FLOAT32 * min(shape.labels // shards, CHUNKS_ALIVE * labels_in_chunk(run)) * vocabulary

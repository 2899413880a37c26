"""Memory and reading of a training whose base stays on disk (engine/block_loop.py)."""

from collections import Counter

from safetrain.core.memory.terms import (
    FLOAT32,
    Backend,
    Shape,
    activation_bytes,
    adapter_activation_bytes,
    base_bytes,
    dequantized_bytes,
    head_bytes,
    kept_score_bytes,
    logit_bytes,
    shards_of,
    tiles_bytes,
    trained_parameters,
)
from safetrain.core.model.files import ModelFiles, in_blocks
from safetrain.core.records.settings import LoraSettings, MemoryTerm

KEPT_BYTES = 2**28  # most inputs of blocks between the passes; rows with more of them read the blocks again
HEAD_SLICES = 32  # in which the engine dequantizes a head
SLICES_ALIVE = 3  # in 16 bits, in float32, and the one before
# Factors on the estimated terms (measured: benchmarks/bench_stream). A memory limit bounds what mlx dequantizes ahead.
COEFFICIENTS = {
    "inputs of blocks": 1.15,
    "two blocks of the base": 1.0,
    "block in its backward pass": 1.2,  # without a limit, on a GPU, its gradients too
    "attention scores": 1.3,
    "a block's weights, dequantized": 1.5,
    "gradient": 1.0,
    "head of the base": 1.0,
    "head, dequantized": 1.0,
    "logits and loss": 1.3,
    "logits of other shards": 1.0,
}


def slices_head(labels: int, width: int) -> bool:
    """Whether the logits and gradients of so many labels take less memory than a head of this width in float32."""
    return 2 * labels < width


def streamed_phases(
    model: ModelFiles, lora: LoraSettings, shape: Shape, backend: Backend
) -> tuple[tuple[MemoryTerm, ...], ...]:
    """The temporary terms of a step at the two moments that can be the peak: the loss, a block's backward pass.

    The inputs of blocks are kept for all rows that pass through a block together. One block is computed while the next
    is read.
    """
    number, shards = backend.compute_bytes, shards_of(model, shape, backend)
    one = lora.num_layers * model.hidden_size * number * shape.total
    together = one * shape.update_tokens // shape.total if shape.update_tokens else KEPT_BYTES * shape.accumulates
    kept = max(one, min(KEPT_BYTES, together))
    gradient, blocks = FLOAT32 * trained_parameters(model, lora, backend.method), block_bytes(model, backend)
    activations = activation_bytes(model, shape, number) + adapter_activation_bytes(model, lora, shape, backend)
    logits, head = logit_bytes(model, shape, backend), head_bytes(model, backend)
    labels = shape.total if shape.labels is None else shape.labels
    if head and slices_head(labels, model.hidden_size):
        logits, head = FLOAT32 * labels * model.vocab_size // shards, head // HEAD_SLICES * SLICES_ALIVE
    loss = {
        "inputs of blocks": kept,
        "head of the base": _head_of_base(model, backend, blocks),
        "head, dequantized": head,
        "logits and loss": logits,
        "logits of other shards": (shards - 1) * logits,
    }
    backward = {
        "inputs of blocks": kept,
        "two blocks of the base": 2 * max(blocks.values(), default=0),
        "block in its backward pass": activations if backend.computes_in_float32 else 2 * activations,
        "attention scores": kept_score_bytes(model, shape) + tiles_bytes(model, shape, backend),
        "a block's weights, dequantized": dequantized_bytes(model, shape, backend),
        "gradient": gradient + shards * gradient // lora.num_layers,
    }
    return tuple(
        tuple(MemoryTerm(name, int(COEFFICIENTS[name] * size)) for name, size in sizes.items() if size)
        for sizes in (loss, backward)
    )


def block_bytes(model: ModelFiles, backend: Backend) -> Counter[int]:
    """Bytes of each block in memory, by its number; equal ones where the files name no blocks."""
    base, stored = base_bytes(model, backend), _stored_bytes(model)
    if not stored:
        return Counter(dict.fromkeys(range(model.num_layers), base // (model.num_layers + 1)))
    share = base / max(1, sum(tensor.size_bytes for tensor in model.tensors))
    return Counter({block: int(size * share) for block, size in stored.items()})


def _stored_bytes(model: ModelFiles) -> Counter[int]:
    """Bytes of each block in the model's files, by its number."""
    sizes = Counter[int]()
    for block, _, tensor in in_blocks(model):
        sizes[block] += tensor.size_bytes
    return sizes


def _head_of_base(model: ModelFiles, backend: Backend, blocks: Counter[int]) -> int:
    """Bytes of the head: half of what is outside of blocks, unless it is the embedding too."""
    outside = base_bytes(model, backend) - sum(blocks.values())
    weights = model.parameters - sum(tensor.weights for _, _, tensor in in_blocks(model))
    return outside if weights < 1.5 * model.vocab_size * model.hidden_size else outside // 2


def read_bytes(model: ModelFiles, lora: LoraSettings, shape: Shape, backend: Backend) -> int:
    """Bytes that a step reads: each block forward, each trained one backward, once for each group of rows."""
    sizes = _stored_bytes(model)
    lowest, token_bytes = model.num_layers - lora.num_layers, model.hidden_size * backend.compute_bytes
    tokens = max(shape.total, shape.update_tokens)
    together = max(shape.total, KEPT_BYTES // (lora.num_layers * token_bytes))
    passes = sum(size * (1 + (block >= lowest)) for block, size in sizes.items())
    return -(-tokens // together) * (passes + model.static_bytes - sum(sizes.values()))

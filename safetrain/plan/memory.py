"""A closed-form estimate of the peak memory of a training, term by term. Pure arithmetic on a model's headers.

Peak = what is always there + the larger of its two phases: the end of the forward pass, when every layer's stored
activations and the logits are alive, and the optimizer. Terms follow the derivation for a Llama block with LoRA on
every linear layer; the coefficient of the logits is measured. benchmarks/bench_memory_estimate.py compares the sum with
mlx's own peak. Unverified on a new machine: recommended_config.json says so.
"""

from dataclasses import dataclass

from safetrain.core.model_files import ModelFiles
from safetrain.core.settings import LoraSettings, MemoryTerm

INTERPRETER_BYTES = 200 * 2**20  # Python, mlx, tokenizer: 0.14 GiB resident before training (measured, Linux CPU)
ADAM_COPIES = 4  # float32 weight, gradient, two moments
LOGIT_COPIES = 4  # logits, shifted logits, softmax, gradient (measured on CPU, mlx 0.32.4)
SCORE_COPIES_TRANSIENT = 2.5  # further copies of the attention scores in the layer at work (measured)
FLOAT32 = 4


@dataclass(frozen=True)
class Shape:
    """What a micro-batch looks like: rows and tokens per row, padding included."""

    rows: int
    tokens: int


@dataclass(frozen=True)
class Backend:
    """What the estimate must know of where it runs."""

    compute_bytes: int  # of one number in the residual stream
    dequantize_base: bool
    computes_in_float32: bool  # CPU: unpacked weights become float32


def predicted_peak(
    model: ModelFiles, lora: LoraSettings, shape: Shape, accumulates: bool, backend: Backend
) -> tuple[MemoryTerm, ...]:
    """The terms of the peak, in bytes; their sum is the prediction."""
    adapter_numbers = lora_parameters(model, lora)
    return (
        MemoryTerm("base weights", base_bytes(model, backend)),
        MemoryTerm("adapter, gradient and Adam", adapter_numbers * FLOAT32 * (ADAM_COPIES + accumulates)),
        MemoryTerm("stored activations", lora.num_layers * activation_bytes(model, shape, backend.compute_bytes)),
        MemoryTerm("attention scores", score_bytes(model, lora, shape, backend.compute_bytes)),
        MemoryTerm("logits and loss", LOGIT_COPIES * FLOAT32 * shape.rows * shape.tokens * model.vocab_size),
        MemoryTerm("interpreter and libraries", INTERPRETER_BYTES),
    )


def base_bytes(model: ModelFiles, backend: Backend) -> int:
    """Bytes of the base: as stored, or of every weight once unpacked."""
    if backend.dequantize_base or (backend.computes_in_float32 and model.quantization_bits is None):
        return model.parameters * (FLOAT32 if backend.computes_in_float32 else backend.compute_bytes)
    return model.static_bytes


def lora_parameters(model: ModelFiles, lora: LoraSettings) -> int:
    """Numbers in the adapter, for LoRA on the seven linear layers of a block: rank x (inputs + outputs) each."""
    hidden, width = model.hidden_size, model.intermediate_size
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = (hidden + query) * 2 + (hidden + key_value) * 2
    feed_forward = (hidden + width) * 3
    return lora.rank * lora.num_layers * (attention + feed_forward)


def activation_bytes(model: ModelFiles, shape: Shape, compute_bytes: int) -> int:
    """Bytes that one block with LoRA keeps for its backward pass, attention scores apart.

    Per token: the block's input, two norms, the attention's sum and output (5 hidden), queries and keys before and
    after rotation and values (2 query + 3 key/value), the attention's result (1 query), and gate, up, activated gate
    and product (4 feed-forward widths). A 16-bit stream also keeps a float32 copy of each LoRA input, measured at a
    quarter more.
    """
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    numbers = 5 * model.hidden_size + 3 * query + 3 * key_value + 4 * model.intermediate_size
    factor = 1.0 if compute_bytes == FLOAT32 else 1.25
    return int(shape.rows * shape.tokens * numbers * compute_bytes * factor)


def score_bytes(model: ModelFiles, lora: LoraSettings, shape: Shape, compute_bytes: int) -> int:
    """Attention probabilities: one stored copy in each trained block, and transient copies in the block at work."""
    one = model.num_heads * shape.rows * shape.tokens**2 * compute_bytes
    return int(one * (lora.num_layers + SCORE_COPIES_TRANSIENT))

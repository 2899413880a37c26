"""How long an update takes: operations counted from a model's headers, and what several ranks bring. Arithmetic alone.

Every rank has all weights and computes its share of an update's rows; the gradient is summed over a ring (Patarasuk
and Yuan 2009): in 2 (N - 1) steps each rank sends, and receives, 2 (N - 1) / N of it.
"""

import math
from dataclasses import dataclass

from safetrain.core.memory.terms import FLOAT32
from safetrain.core.model.files import ModelFiles

FORWARD, BACKWARD, WEIGHT_GRADIENT = 2, 2, 2  # operations for each weight that a token is multiplied with
ATTENTION_PASSES = 3  # scores and their result, forward once and backward twice
EMBEDDING, HEAD = "embed_tokens", "lm_head"
MESSAGE_BYTES = 64 * 2**20  # a larger gradient is summed in several messages
USUAL_LATENCY = 50e-6  # seconds until a small message is there, by TCP over Ethernet; assumed
BITS = 8
# Bytes that move in memory for each trained number while the optimizer works: Adam reads weight, gradient and two
# moments in float32, writes three of them; clipping and averaging read and write the gradient once more.
OPTIMIZER_BYTES = 9 * FLOAT32
MEMORY_BYTES_PER_SECOND = {"cpu": 15e9, "metal": 100e9, "cuda": 300e9}  # assumed


@dataclass(frozen=True)
class Speed:
    """What is known of a machine's speed; both None: nothing."""

    tflops: float | None  # 10^12 operations a second
    source: str
    step_seconds: float | None = None  # of an update, measured for this very training
    rows: int = 0  # of that update
    length: int = 0  # tokens of its rows, at the most


@dataclass(frozen=True)
class Link:
    """The link between a rank and the next."""

    gbps: float  # 10^9 bits a second, in each direction
    latency_seconds: float = USUAL_LATENCY


@dataclass(frozen=True)
class SharedUpdate:
    """An update on one rank."""

    compute_seconds: float  # for the gradient of all rows; ranks share it
    fixed_seconds: float  # for what every rank does whole: clipping, optimizer
    gradient_bytes: int  # float32, of what is trained
    rows: int  # that ranks share


def multiplied_weights(model: ModelFiles) -> int:
    """Weights that every token is multiplied with: all matrices, but not the embedding, unless it is the head too."""
    matrices = [tensor for tensor in model.tensors if tensor.weights and len(tensor.shape) >= 2]
    has_head = any(HEAD in tensor.name for tensor in matrices)
    return sum(tensor.weights for tensor in matrices if not (has_head and EMBEDDING in tensor.name))


def flops_per_token(model: ModelFiles, length: int, trained: int, *, recompute: bool = False) -> float:
    """Operations for a token of rows of ``length`` tokens, ``trained`` of the weights being trained.

    6 for each weight that is trained, 4 for a frozen one below an adapter (Kaplan et al. 2020, arXiv:2001.08361), and
    attention, half of the 12 x layers x width x length of PaLM (arXiv:2204.02311, appendix B), because a token sees
    only those before it. Adapters have their own weights, next to the base's.
    """
    weights = multiplied_weights(model)
    attention = FORWARD * ATTENTION_PASSES * model.num_layers * model.num_heads * model.head_dim * length
    again = FORWARD * weights + attention / ATTENTION_PASSES if recompute else 0
    return (FORWARD + BACKWARD) * weights + WEIGHT_GRADIENT * trained + attention + again


def shared_update(speed: Speed, flops: float, trained: int, backend: str, rows: int) -> SharedUpdate | None:
    """An update of ``flops`` operations on ``rows``, or the one that was measured; None: the speed is not known.

    Of a measured one only the whole time is known: the part that does not shrink is modelled.
    """
    fixed = OPTIMIZER_BYTES * trained / MEMORY_BYTES_PER_SECOND[backend]
    if speed.step_seconds is not None:
        fixed = min(speed.step_seconds / 2, fixed)
        return SharedUpdate(speed.step_seconds - fixed, fixed, FLOAT32 * trained, speed.rows)
    if speed.tflops is None:
        return None
    return SharedUpdate(flops / (speed.tflops * 1e12), fixed, FLOAT32 * trained, rows)


def wire_bytes(gradient_bytes: int, ranks: int) -> int:
    """Bytes that each of ``ranks`` sends, and receives, to sum a gradient: 2 (N - 1) / N of it."""
    return math.ceil(2 * (ranks - 1) / ranks * gradient_bytes)


def exchange_seconds(gradient_bytes: int, ranks: int, link: Link) -> float:
    """For that, with 2 (N - 1) latencies for each message."""
    messages = max(1, -(-gradient_bytes // MESSAGE_BYTES))
    carried = wire_bytes(gradient_bytes, ranks) * BITS / (link.gbps * 1e9)
    return carried + 2 * (ranks - 1) * messages * link.latency_seconds


def update_seconds(update: SharedUpdate, ranks: int, link: Link) -> float:
    """An update over ``ranks``. The largest share counts: 16 rows over 5 ranks take as long as 4 rows do."""
    share = -(-update.rows // ranks) / update.rows
    exchange = exchange_seconds(update.gradient_bytes, ranks, link)
    return update.compute_seconds * share + update.fixed_seconds + exchange

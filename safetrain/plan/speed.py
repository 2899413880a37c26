"""Estimate training time: operations per step, speed-up from ranks, tokens for pretraining.

Every rank holds all weights and computes its share of a step's rows; a ring sums the gradient (Patarasuk and Yuan
2009): in 2 (N - 1) steps each rank sends, and receives, 2 (N - 1) / N of it.

For a given compute, 20 tokens per parameter train best (Hoffmann et al. 2022, arXiv:2203.15556,
table 3). Up to four passes over the same text are worth nearly as much as new text; more are worth much less
(Muennighoff et al. 2023, arXiv:2305.16264).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from safetrain.core.formatting import duration_text, size_text
from safetrain.core.memory.terms import FLOAT32
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.schema import Train
from safetrain.core.records.settings import Recommendation

FORWARD, BACKWARD, WEIGHT_GRADIENT = 2, 2, 2  # operations per weight and token
ATTENTION_PASSES = 3  # scores and weighted values: once forward, twice backward
EMBEDDING, HEAD = "embed_tokens", "lm_head"
MESSAGE_BYTES = 64 * 2**20  # a larger gradient is summed in several messages
USUAL_LATENCY = 50e-6  # seconds for a small message, TCP over Ethernet; assumed
BITS = 8
# Bytes of memory traffic per trained number in an optimizer step: Adam reads weight, gradient and two
# moments in float32, writes three of them; clipping and averaging read and write the gradient once more.
OPTIMIZER_BYTES = 9 * FLOAT32
MEMORY_BYTES_PER_SECOND = {"cpu": 15e9, "metal": 100e9, "cuda": 300e9}  # assumed
TOKENS_PER_PARAMETER = 20
MOST_PASSES = 4
FAR_BELOW = 0.5  # share of the wanted tokens
DAY_SECONDS = 86_400
FURTHEST = timedelta(days=365_000)


@dataclass(frozen=True)
class Speed:
    """A machine's speed; unknown if ``tflops`` and ``step_seconds`` are both None."""

    tflops: float | None  # 10^12 operations a second
    source: str
    step_seconds: float | None = None  # of a step, measured for this training
    rows: int = 0  # of that update
    length: int = 0  # most tokens in its rows


@dataclass(frozen=True)
class Link:
    """The link between a rank and the next."""

    gbps: float  # 10^9 bits per second, in each direction
    latency_seconds: float = USUAL_LATENCY


@dataclass(frozen=True)
class SharedUpdate:
    """Cost of a step that ranks share."""

    compute_seconds: float  # gradient of all rows; ranks share this
    fixed_seconds: float  # clipping and optimizer, which every rank does in full
    gradient_bytes: int  # float32, of the trained weights
    rows: int  # that ranks share


def multiplied_weights(model: ModelFiles) -> int:
    """Weights multiplied with every token: all matrices except the embedding, unless it is also the head."""
    matrices = [tensor for tensor in model.tensors if tensor.weights and len(tensor.shape) >= 2]
    has_head = any(HEAD in tensor.name for tensor in matrices)
    return sum(tensor.weights for tensor in matrices if not (has_head and EMBEDDING in tensor.name))


def flops_per_token(model: ModelFiles, length: int, trained: int, *, recompute: bool = False) -> float:
    """Operations per token in rows of ``length`` tokens, with ``trained`` trained weights.

    6 per trained weight, 4 per frozen weight below an adapter (Kaplan et al. 2020, arXiv:2001.08361), and
    attention, half of the 12 x layers x width x length of PaLM (arXiv:2204.02311, appendix B), because a token sees
    only earlier tokens. Adapter weights count in addition to the base's.
    """
    weights = multiplied_weights(model)
    attention = FORWARD * ATTENTION_PASSES * model.num_layers * model.num_heads * model.head_dim * length
    again = FORWARD * weights + attention / ATTENTION_PASSES if recompute else 0
    return (FORWARD + BACKWARD) * weights + WEIGHT_GRADIENT * trained + attention + again


def shared_update(speed: Speed, flops: float, trained: int, backend: str, rows: int) -> SharedUpdate | None:
    """A step of ``flops`` operations on ``rows`` rows, or the measured step; None if the speed is unknown.

    A measured step has only a total time; its fixed part is modelled.
    """
    fixed = OPTIMIZER_BYTES * trained / MEMORY_BYTES_PER_SECOND[backend]
    if speed.step_seconds is not None:
        fixed = min(speed.step_seconds / 2, fixed)
        return SharedUpdate(speed.step_seconds - fixed, fixed, FLOAT32 * trained, speed.rows)
    if speed.tflops is None:
        return None
    return SharedUpdate(flops / (speed.tflops * 1e12), fixed, FLOAT32 * trained, rows)


def wire_bytes(gradient_bytes: int, ranks: int) -> int:
    """Bytes that each of ``ranks`` ranks sends, and receives, to sum a gradient: 2 (N - 1) / N of its size."""
    return math.ceil(2 * (ranks - 1) / ranks * gradient_bytes)


def exchange_seconds(gradient_bytes: int, ranks: int, link: Link) -> float:
    """Time to sum a gradient, with 2 (N - 1) latencies per message."""
    messages = max(1, -(-gradient_bytes // MESSAGE_BYTES))
    carried = wire_bytes(gradient_bytes, ranks) * BITS / (link.gbps * 1e9)
    return carried + 2 * (ranks - 1) * messages * link.latency_seconds


def update_seconds(update: SharedUpdate, ranks: int, link: Link) -> float:
    """Time of a step on ``ranks`` ranks. The largest share counts: 16 rows on 5 ranks take as long as 4 rows."""
    share = -(-update.rows // ranks) / update.rows
    exchange = exchange_seconds(update.gradient_bytes, ranks, link)
    return update.compute_seconds * share + update.fixed_seconds + exchange


def wanted_tokens(parameters: int, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> int:
    """Recommended training tokens for a model of ``parameters`` parameters."""
    return math.ceil(parameters * tokens_per_parameter)


def tokens_to_train(parameters: int, tokens_there: int, train: Train) -> int:
    """Tokens that a run reads: the pinned epochs, else the recommended tokens in at most four epochs."""
    if train.num_epochs is not None:
        return train.num_epochs * tokens_there
    return min(wanted_tokens(parameters), MOST_PASSES * tokens_there)


def passes_for(parameters: int, tokens_there: int) -> tuple[int, str]:
    """Epochs to reach the recommended tokens, at most four; and the reason."""
    target = wanted_tokens(parameters)
    needed = math.ceil(target / max(1, tokens_there))
    count = max(1, min(MOST_PASSES, needed))
    per = f"{TOKENS_PER_PARAMETER} tokens per parameter (Hoffmann et al. 2022)"
    text = f"{per} are {count_text(target)}; there are {count_text(tokens_there)}"
    if needed > count:
        text += f": {needed:,} passes; more than {MOST_PASSES} are worth much less (Muennighoff et al. 2023)"
    return count, text


def trained_tokens(plan: Recommendation, tokens_there: int) -> int:
    """Tokens that a recommended pretraining reads from training documents of ``tokens_there`` tokens."""
    passes = plan.num_epochs * tokens_there
    return passes if plan.max_steps is None else min(passes, plan.max_steps * _step_tokens(plan))


def _step_tokens(plan: Recommendation) -> int:
    return plan.batch_size * plan.gradient_accumulation * plan.max_seq_length  # windows are full


def pretraining_lines(
    plan: Recommendation, parameters: int, tokens_there: int, estimated_seconds: float | None, store_bytes: int,
    now: datetime,
) -> Iterator[str]:  # fmt: skip
    """Describe a recommended pretraining; ``now`` is its start.

    ``estimated_seconds`` is its time from operations, used without a dry run; None if unknown.
    """
    target, trained = wanted_tokens(parameters), trained_tokens(plan, tokens_there)
    share, passes = trained / target, trained / max(1, tokens_there)
    yield (
        f"{count_text(parameters)} parameters want {count_text(target)} tokens "
        f"({TOKENS_PER_PARAMETER} each); there are {count_text(tokens_there)}: {passes:.2g} "
        f"{'pass' if passes == 1 else 'passes'}, {100 * share:.3g} % of those"
    )
    if passes > MOST_PASSES:
        yield f"more than {MOST_PASSES} passes are worth much less (Muennighoff et al. 2023): find more text"
    elif share < FAR_BELOW:
        yield "with so little text the model stays far below what its size can learn: find more, or train a smaller one"
    disk = f"{size_text(plan.disk_bytes + store_bytes)} on disk"
    seconds, by = plan.total_seconds, "measured here"
    if seconds is None:
        seconds, by = estimated_seconds, "computed from operations, as no dry run was made"
    if seconds is None:
        yield f"time unknown: no dry run was made; {disk}"
        return
    per_second = _step_tokens(plan) / plan.step_seconds if plan.step_seconds else trained / max(seconds, 1e-9)
    finish = f"finished on {finish_text(now, seconds)} if it starts now"
    yield f"{per_second:,.0f} tokens a second, {by}: {duration_text(seconds)}, {finish}; {disk}"


def finish_text(now: datetime, seconds: float) -> str:
    """The end date, with the time if within two days; a number of years if the date is too far away."""
    ahead = timedelta(seconds=seconds) if seconds < FURTHEST.total_seconds() else FURTHEST
    if now.year + ahead.days / 365 > 9000 or ahead == FURTHEST:
        return f"no date: {seconds / DAY_SECONDS / 365:,.0f} years"
    end = now + ahead
    return f"{end:%Y-%m-%d %H:%M}" if ahead < timedelta(days=2) else f"{end:%Y-%m-%d}"


def count_text(number: float) -> str:
    """A count as text, such as ``1.7 billion``, ``85 million`` or ``9,870``."""
    if number >= 1e9:
        return f"{number / 1e9:,.3g} billion" if number < 1e12 else f"{number / 1e12:,.3g} trillion"
    return f"{number / 1e6:.3g} million" if number >= 1e6 else f"{number:,.0f}"

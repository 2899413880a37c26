"""What several ranks bring: time and traffic of an update that they share. Arithmetic alone, nothing is asked.

Every rank has all weights and computes its share of an update's rows; the gradient is summed over a ring (Patarasuk
and Yuan 2009): in 2 (N - 1) steps each rank sends, and receives, 2 (N - 1) / N of it.
"""

import math
from dataclasses import dataclass

MESSAGE_BYTES = 64 * 2**20  # a larger gradient is summed in several messages
USUAL_LATENCY = 50e-6  # seconds until a small message is there, by TCP over Ethernet; assumed
LEAST_GAIN = 0.5  # of what a rank does alone, that another one has to bring to pay
MOST_RANKS = 1024
BITS = 8
# Bytes that move in memory for each trained number while the optimizer works: Adam reads weight, gradient and two
# moments in float32, writes three of them; clipping and averaging read and write the gradient once more.
OPTIMIZER_BYTES = 9 * 4
MEMORY_BYTES_PER_SECOND = {"cpu": 15e9, "metal": 100e9, "cuda": 300e9}  # assumed


@dataclass(frozen=True)
class Link:
    """What connects each rank with the next."""

    gbps: float  # 10^9 bits a second, in each direction
    latency_seconds: float = USUAL_LATENCY


@dataclass(frozen=True)
class SharedUpdate:
    """An update as one rank makes it alone."""

    compute_seconds: float  # for the gradient of all rows; ranks share it
    fixed_seconds: float  # for what every rank does whole: clipping, optimizer
    gradient_bytes: int  # float32, of what is trained
    rows: int  # that ranks share


@dataclass(frozen=True)
class RankTime:
    """An update over so many ranks."""

    ranks: int
    wire_bytes: int  # that each rank sends, and receives
    exchange_seconds: float
    seconds: float
    speed_up: float  # of one rank


def wire_bytes(gradient_bytes: int, ranks: int) -> int:
    """That each of ``ranks`` sends, and receives, to sum a gradient: 2 (N - 1) / N of it."""
    return math.ceil(2 * (ranks - 1) / ranks * gradient_bytes)


def exchange_seconds(gradient_bytes: int, ranks: int, link: Link) -> float:
    """For that, with 2 (N - 1) latencies for each message."""
    messages = max(1, -(-gradient_bytes // MESSAGE_BYTES))
    carried = wire_bytes(gradient_bytes, ranks) * BITS / (link.gbps * 1e9)
    return carried + 2 * (ranks - 1) * messages * link.latency_seconds


def time_of(update: SharedUpdate, ranks: int, link: Link) -> RankTime:
    """An update over ``ranks``. The largest share counts: 16 rows over 5 ranks take as long as 4 rows do."""
    share = -(-update.rows // ranks) / update.rows
    exchange = exchange_seconds(update.gradient_bytes, ranks, link)
    alone = update.compute_seconds + update.fixed_seconds
    seconds = update.compute_seconds * share + update.fixed_seconds + exchange
    return RankTime(ranks, wire_bytes(update.gradient_bytes, ranks), exchange, seconds, alone / seconds)


def most_that_pay(update: SharedUpdate, link: Link, most: int = MOST_RANKS) -> int:
    """The most ranks of which each one added brings at least half of what a rank does alone.

    Ranks are added together where one alone changes nothing (the fifth of 16 rows does, the ninth does not).
    """
    paying, speed = 1, 1.0
    for ranks in range(2, min(most, update.rows) + 1):
        faster = time_of(update, ranks, link).speed_up
        if faster - speed >= LEAST_GAIN * (ranks - paying):
            paying, speed = ranks, faster
    return paying


def optimizer_seconds(trained: int, backend: str) -> float:
    """For what every rank does whole, of ``trained`` numbers: memory that is read and written, at an assumed speed."""
    return OPTIMIZER_BYTES * trained / MEMORY_BYTES_PER_SECOND[backend]


def modelled_update(
    flops: float, tflops: float, trained: int, backend: str, rows: int, gradient_bytes: int
) -> SharedUpdate:
    """An update of ``flops`` operations on a machine that makes ``tflops`` 10^12 a second."""
    return SharedUpdate(flops / (tflops * 1e12), optimizer_seconds(trained, backend), gradient_bytes, rows)


def measured_update(step_seconds: float, trained: int, backend: str, rows: int, gradient_bytes: int) -> SharedUpdate:
    """An update of which only the whole time was measured; the part that does not shrink is modelled."""
    fixed = min(step_seconds / 2, optimizer_seconds(trained, backend))
    return SharedUpdate(step_seconds - fixed, fixed, gradient_bytes, rows)

"""What `safetrain estimate --ranks` prints."""

from rich.console import Console
from rich.table import Table

from safetrain.core.formatting import size_text
from safetrain.plan.rank_times import LEAST_GAIN, Link, SharedUpdate, most_that_pay, time_of, wire_bytes
from safetrain.plan.training_speed import Speed


def print_ranks(
    console: Console, update: SharedUpdate | None, gradient_bytes: int, ranks: int, link: Link, speed: Speed
) -> None:
    """Traffic and time of an update over up to ``ranks``; without ``update``, traffic alone."""
    here = f"{link.gbps:g} Gbit/s, {1e6 * link.latency_seconds:g} us a message"
    console.print(f"\nan update shared by ranks, linked by {here} (modelled)", style="italic", highlight=False)
    each = "Each rank has a machine like this to itself, and all weights: it needs the memory above; its gradient has "
    each += f"{size_text(gradient_bytes)}."
    if update is None:
        traffic = size_text(wire_bytes(gradient_bytes, ranks))
        console.print(f"{each} With {ranks} ranks each sends and receives {traffic} an update.", highlight=False)
        console.print(f"time: {speed.source}", highlight=False)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("ranks", "each sends, an update", "exchange, s", "update, s", "speed-up"):
        table.add_column(name, justify="right")
    for count in counts_up_to(ranks):
        time = time_of(update, count, link)
        table.add_row(
            str(count), size_text(time.wire_bytes), f"{time.exchange_seconds:.3g}", f"{time.seconds:.3g}",
            f"{time.speed_up:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"{each} Alone: {speed.source}.", highlight=False)
    paying = most_that_pay(update, link)
    why = f"an update has {update.rows} rows" if paying == update.rows else "then the rest of an update weighs more"
    console.print(
        f"Up to {paying} ranks pay: those added bring on average {LEAST_GAIN:g} or more of what one does alone; {why}."
        if paying > 1
        else f"A second rank does not pay: it brings less than {LEAST_GAIN:g} of what a rank does alone.",
        highlight=False,
    )


def counts_up_to(ranks: int) -> list[int]:
    """1, 2, 4, … and ``ranks``."""
    return sorted({2**power for power in range(ranks.bit_length())} | {ranks})

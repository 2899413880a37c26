"""Notices that the machine swaps instead of training, while everything is still alive."""

import statistics

from safetrain.core.formatting import size_text
from safetrain.core.records.metrics import StepRecord

ENOUGH = 4  # records before a speed is called usual
SLOW_SHARE = 0.5
SWAP_GROWTH_BYTES = 64 * 2**20


class Thrashing:
    """Compares each record's speed with the usual one, and the swap in use with that of the previous record."""

    def __init__(self) -> None:
        self._speeds: list[float] = []
        self._swap_bytes: int | None = None

    def warning(self, record: StepRecord, swap_used_bytes: int) -> str:
        """What to say after a record; empty while all is well."""
        before, self._swap_bytes = self._swap_bytes, swap_used_bytes
        if record.labels_per_second is None:
            return ""
        usual = statistics.median(self._speeds) if len(self._speeds) >= ENOUGH else None
        self._speeds.append(record.labels_per_second)
        grown = 0 if before is None else swap_used_bytes - before
        if usual is None or record.labels_per_second > SLOW_SHARE * usual or grown < SWAP_GROWTH_BYTES:
            return ""
        return (
            f"warning: at step {record.step} the speed is {100 * record.labels_per_second / usual:.0f} % of the usual, "
            f"and swap has grown by {size_text(grown)}: this machine is out of memory in all but name. Close other "
            "programs, or stop (Ctrl-C saves) and continue with a smaller train.batch_size; the result is the same"
        )

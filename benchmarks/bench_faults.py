"""The fifteen known faults of mlx-lm's trainer: each provoked in mlx-lm's own code, and looked for in a run of ours."""

import importlib.metadata
import sys

from benchmarks.machine import write_result
from tests.support.faults.all_cases import FAULTS
from tests.support.faults.fault import Fault

CORRECTED = "corrected"


def main() -> None:
    """One row a fault; ends with 1 when a verdict is not as claimed."""
    rows = [compare(fault) for fault in FAULTS]
    header = ["", "fault, and what is right", f"mlx-lm {importlib.metadata.version('mlx-lm')}", "safetrain", "verdict"]
    write_result("bench_faults", "Faults of mlx-lm's trainer, planted and looked for", header, rows)
    sys.exit(any(not str(row[-1]).startswith(CORRECTED) for row in rows))


def compare(fault: Fault) -> list[object]:
    """The row of one fault."""
    peer, ours = fault.peer(), fault.ours()
    cells = [peer.text, ours.text, verdict(fault, peer.faulty, ours.faulty)]
    subject = f"{fault.title} (right: {fault.expected})"
    return [fault.number, *(text.replace("|", "\\|") for text in (subject, *cells))]


def verdict(fault: Fault, in_peer: bool, in_ours: bool) -> str:
    """Whether both sides are as claimed."""
    if in_peer and not in_ours:
        return CORRECTED if fault.observable else f"{CORRECTED}, as far as this machine shows: {fault.argument}"
    return "not as claimed: " + ("mlx-lm does not have it" if not in_peer else "safetrain has it too")


if __name__ == "__main__":
    main()

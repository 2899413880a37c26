"""Published memory readings of real Macs and NVIDIA GPUs, to test the budget rule against: readings.csv.

Device bytes: Metal's recommendedMaxWorkingSetSize, more in macOS 26 than before; CUDA: total less
the driver's part and other processes. Usable bytes: what one process could take there, by a published run or failure,
else the working set; of PyTorch's errors what was allocated, reserved and still free.
"""

import csv
from pathlib import Path
from typing import NamedTuple


class Reading(NamedTuple):
    """One machine as somebody published it."""

    name: str
    backend: str  # metal, cuda
    total_bytes: int
    device_bytes: int
    usable_bytes: int
    wired_bytes: int  # Metal, before the run


with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as file:
    READINGS = [Reading(row[0], row[1], *map(int, row[2:6])) for row in list(csv.reader(file))[1:]]
T4 = next(each for each in READINGS if each.name.startswith("T4 on Colab"))

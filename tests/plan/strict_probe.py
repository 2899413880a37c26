"""A probe that answers at once, as the closed form says: `python -m tests.plan.strict_probe REQUEST`

What its companion, the rehearsal, does with the model itself ``$PROBE`` says: fits (the default), ``dies 4`` for more
than so many rows at a time, ``large 4`` to take a terabyte for more than so many, ``broken`` to end with an error that
has nothing to do with memory.
"""

import dataclasses
import json
import sys
from pathlib import Path

from safetrain.core.memory import predicted_peak, total_bytes
from safetrain.core.model_files import read_model_files
from safetrain.core.probes import Measured, ProbePoint, read_request
from safetrain.plan.calibration import backend_for, shape_of, shortened


def main(path: str) -> None:
    """Answer every point of the request."""
    request = read_request(Path(path))
    for point in request.points:
        peak = peak_of(Path(request.folder), point)
        micro_batch = 0.05 + 1e-5 * point.num_layers * point.settings.batch_size * point.tokens
        seconds = point.settings.gradient_accumulation * micro_batch
        print(json.dumps(dataclasses.asdict(Measured(point, peak // 2, peak, seconds, "cpu"))), flush=True)


def peak_of(folder: Path, point: ProbePoint) -> int:
    """By the closed form."""
    short = shortened(read_model_files(folder), point.num_layers)
    terms = predicted_peak(short, point.settings.lora, shape_of(point), backend_for(short, point, "cpu"))
    return total_bytes(terms)


if __name__ == "__main__":
    main(sys.argv[1])

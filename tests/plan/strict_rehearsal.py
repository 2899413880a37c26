"""A rehearsal that answers at once, as $PROBE tells it to (tests/plan/strict_probe.py).

python -m tests.plan.strict_rehearsal JOB SCRATCH
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from safetrain.core.job import read_job
from safetrain.core.probes import Rehearsed


def main(path: str, _scratch: str) -> None:
    """Answer, or die."""
    job = read_job(Path(path))
    behaviour, _, rows = os.environ.get("PROBE", "fits").partition(" ")
    too_many = job.settings.batch_size > int(rows or 0)
    if behaviour == "broken":
        sys.exit("ImportError: no such thing")
    if behaviour == "dies" and too_many:
        os.abort()
    peak = 2**40 if behaviour == "large" and too_many else job.mlx_limit_bytes or 0
    seconds = 0.05 + 0.01 * job.settings.gradient_accumulation
    took = float(os.environ.get("PROBE_SECONDS", 0.0))
    print(json.dumps(dataclasses.asdict(Rehearsed(peak, peak, seconds, "cpu", took))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

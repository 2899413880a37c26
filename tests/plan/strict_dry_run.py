"""A dry run that answers at once: `python -m tests.plan.strict_dry_run JOB SCRATCH`

``$DRY_RUN`` says how: fits (the default), ``dies 4`` for more than so many rows at a time, ``large 4`` to take a
terabyte for more than so many, ``broken`` to end with an error that has nothing to do with memory.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from safetrain.core.records.settings import DryRun, TrainJob
from safetrain.core.storage.files import read_record


def main(path: str, _scratch: str) -> None:
    """Answer, or die."""
    job = read_record(Path(path), TrainJob)
    behaviour, _, rows = os.environ.get("DRY_RUN", "fits").partition(" ")
    too_many = job.settings.batch_size > int(rows or 0)
    if behaviour == "broken":
        sys.exit("ImportError: no such thing")
    if behaviour == "dies" and too_many:
        os.abort()
    peak = 2**40 if behaviour == "large" and too_many else job.mlx_limit_bytes or 0
    print(json.dumps(dataclasses.asdict(DryRun(peak, peak, 0.1, "cpu", None))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

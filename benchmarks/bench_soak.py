"""Ten minutes of training without a break: does memory stay where it is? ``python -m benchmarks.bench_soak [SECONDS]``

PackedRows of very different lengths, dropout, accumulation, validation and checkpoints; sampled every tenth update.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import write_result
from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.errors import InterruptedRun
from safetrain.core.recorder import Recorder
from safetrain.core.records.metrics import StepRecord
from safetrain.engine.cpu.blas import load_fast_blas
from tests.support.settings import SETTINGS

EMBEDDED = Path(__file__).resolve().parent.parent / "models" / "encyclopedia-3m"
SECONDS = 600.0
LORA = dataclasses.replace(SETTINGS.lora, rank=16, dropout=0.05, num_layers=6)


def main() -> None:
    """Train for that long and compare the quarters."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    load_fast_blas()
    import mlx.core as mx

    from safetrain.core.records.run_state import RunIdentity
    from safetrain.engine.run import Watcher
    from safetrain.engine.training import train
    from tests.support.jobs import job_of

    settings = dataclasses.replace(
        SETTINGS, batch_size=4, gradient_accumulation=4, max_seq_length=512, num_epochs=10_000, eval_steps=50,
        save_steps=50, log_steps=10, lora=LORA, learning_rate=1e-4,
    )  # fmt: skip
    began, samples = time.monotonic(), [(0.0, 0, 0)]

    def sample(records: list[StepRecord]) -> None:
        samples.append((time.monotonic() - began, records[-1].footprint_bytes, mx.get_active_memory()))

    def stop() -> int:
        return 2 * (time.monotonic() - began > seconds)

    with tempfile.TemporaryDirectory() as scratch:
        output, identity = Path(scratch), RunIdentity("base", "train", "valid", "{}")
        job = job_of(output, EMBEDDED, rows(800, 1), rows(60, 2), settings, identity)
        try:
            train(job, Watcher(lambda *_: None, sample, stop, Recorder(output / "recorder.bin")))
        except InterruptedRun as ended:
            print(ended)
    report(samples[1:], seconds)


def report(samples: list[tuple[float, int, int]], seconds: float) -> None:
    """Means of the four quarters of the time, and the last against the second."""
    quarters = [[s for s in samples if int(4 * s[0] / seconds) == quarter] for quarter in range(4)]
    table: list[list[object]] = []
    for name, column in (("resident memory of the process", 1), ("live buffers of mlx", 2)):
        means = [statistics.fmean(s[column] for s in quarter) / 2**20 for quarter in quarters]
        change = 100 * (means[3] / means[1] - 1)
        table.append([name, *(f"{mean:.1f}" for mean in means), f"{change:+.2f} %"])
    header = ["", *(f"quarter {n}, MiB" for n in (1, 2, 3, 4)), "last against second"]
    write_result("bench_soak", f"Memory over {seconds / 60:.0f} minutes of training", header, table)


def rows(count: int, seed: int) -> TokenRows:
    """Lengths from 8 to 500, long-tailed."""
    source = np.random.default_rng(seed)
    lengths = np.clip(np.exp(source.normal(np.log(80), 0.8, count)), 8, 500).astype(int).tolist()
    return TokenRows.of(
        [token_row(source.integers(5, 2048, n).tolist(), [i >= n // 2 for i in range(n)]) for n in lengths]
    )


if __name__ == "__main__":
    main()

"""float32 matrix products on Linux CPU: the wheel's reference BLAS and the one put in front of it, in turn."""

import statistics
import subprocess
import sys

from benchmarks.machine import write_result

ROUNDS = 3
PRODUCT = """
import sys, time
if sys.argv[1] == "fast":
    from safetrain.engine.cpu.blas import load_fast_blas
    assert load_fast_blas().fast
import mlx.core as mx
size = int(sys.argv[2])
a, b = mx.ones((size, size)), mx.ones((size, size))
mx.eval(a, b, a @ b)
began = time.perf_counter()
mx.eval(a @ b)
print(2 * size**3 / (time.perf_counter() - began) / 1e9)
"""


def gflops(which: str, size: int) -> float:
    """One measurement in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PRODUCT, which, str(size)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Median of the rounds, the two in turn."""
    rows: list[list[object]] = []
    for size in (512, 1024, 2048):
        found: dict[str, list[float]] = {"reference": [], "fast": []}
        for _ in range(ROUNDS):
            for which, values in found.items():
                values.append(gflops(which, size))
        reference, fast = statistics.median(found["reference"]), statistics.median(found["fast"])
        rows.append([f"{size} x {size}", f"{reference:.1f}", f"{fast:.0f}", f"{fast / reference:.0f} x"])
    header = ["float32 product", "mlx's wheel, GFLOP/s", "OpenBLAS in front, GFLOP/s", "ratio"]
    write_result("bench_blas", "Matrix products on Linux CPU", header, rows)


if __name__ == "__main__":
    main()

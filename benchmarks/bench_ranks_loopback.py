"""Summing gradients over ranks of this machine: traffic and time, beside what safetrain/plan/speed.py says.

    python -m benchmarks.bench_ranks_loopback

Each rank is a process with mlx's ring; they sum float32 buffers as large as gradients, over loopback.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.machine import write_result
from safetrain.plan.speed import MESSAGE_BYTES, Link, exchange_seconds, wire_bytes

RANKS = (1, 2, 4)
GRADIENTS = {  # trained numbers
    "LoRA rank 16, 0.5B": 8_798_208,
    "LoRA rank 16, 7B": 40_370_176,
    "pretrain 85m": 84_960_576,
}
UPDATES, TIMEOUT_SECONDS = 6, 600
LOOPBACK = ("lo", "lo0")
NOTES = (
    "Sent: the bytes that left by loopback, of all ranks, by an update; TCP's own are in it. Predicted: 2 (N - 1) / N "
    "of the gradient, from each of N.",
    "Time: the median update of rank 0. Predicted with the speed of loopback as it comes out of the largest gradient "
    "with two ranks (marked *), and a latency of 50 us: what is tested is how time grows with ranks and bytes.",
    "All ranks share this machine's two cores, with the network's work for them too: with four, each waits for the "
    "others' turns, which a network of machines does not know. These are sums alone: no gradient is computed.",
)


def main() -> None:
    """A row for each gradient and number of ranks."""
    measured = {(name, ranks): measure(size, ranks) for name, size in GRADIENTS.items() for ranks in RANKS}
    largest = max(GRADIENTS, key=lambda name: GRADIENTS[name])
    link = Link(wire_bytes(4 * GRADIENTS[largest], 2) * 8 / measured[largest, 2][1] / 1e9)
    rows: list[list[object]] = []
    for (name, ranks), (sent, seconds) in measured.items():
        gradient = 4 * GRADIENTS[name]
        expected, predicted = ranks * wire_bytes(gradient, ranks), exchange_seconds(gradient, ranks, link)
        alone = ranks == 1
        rows.append([
            name, f"{gradient / 1e6:,.0f}", ranks, f"{sent / 1e6:,.1f}", f"{expected / 1e6:,.1f}",
            "" if alone else f"{sent / expected:.3f}", f"{seconds:.3f}",
            "" if alone else f"{predicted:.3f}{'*' if (name, ranks) == (largest, 2) else ''}",
            "" if alone else f"{seconds / predicted:.2f}",
        ])  # fmt: skip
    header = [
        "gradient",
        "MB",
        "ranks",
        "sent, MB an update",
        "predicted",
        "ratio",
        "s an update",
        "predicted",
        "ratio",
    ]
    speed = f"Loopback, by the row marked *: {link.gbps:.1f} Gbit/s in each direction."
    write_result("bench_ranks_loopback", "Sums over ranks on loopback, beside the model", header, rows, [speed, *NOTES])


def measure(numbers: int, ranks: int) -> tuple[float, float]:
    """Bytes sent by an update, by all ranks, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.bench_ranks_loopback", "rank", str(numbers)]
        started = [
            subprocess.Popen(
                command,
                env={**os.environ, **({"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} if ranks > 1 else {})},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    found = json.loads(said[0].splitlines()[-1])
    return found["sent"], found["seconds"]


def rank(numbers: int) -> None:
    """One process: sum as the training does, in messages of limited size, and say what that took."""
    import mlx.core as mx

    group = mx.distributed.init(strict="MLX_HOSTFILE" in os.environ, backend="ring")
    most = MESSAGE_BYTES // 4
    parts = [mx.ones(min(most, numbers - start)) for start in range(0, numbers, most)]
    mx.eval(parts)

    def update() -> None:
        for part in parts:
            mx.eval(mx.distributed.all_sum(part, group=group))

    update()  # connections and buffers are made
    before, seconds = sent_bytes(), list[float]()
    for _ in range(UPDATES):
        began = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - began)
    sent = (sent_bytes() - before) / UPDATES
    print(json.dumps({"sent": sent, "seconds": sorted(seconds)[len(seconds) // 2]}))


def sent_bytes() -> int:
    """By loopback since the system started."""
    counters = psutil.net_io_counters(pernic=True)
    return next(counters[name].bytes_sent for name in LOOPBACK if name in counters)


def free_ports(count: int) -> Sequence[int]:
    """Ports that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(int(sys.argv[2]))
    else:
        main()

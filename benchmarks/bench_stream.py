"""A step with the base on disk beside the same step with it in memory: bits, memory, seconds, bytes read.

    python -m benchmarks.bench_stream [MODEL TOKENS [MODE …]]

Random 4-bit weights in the shapes of published models; rank 8 on all linear layers of all blocks; one micro-batch of
one row, with "disk, two ranks" one in each; gradient, optimizer step and saving of adapter and moments. Each
measurement is a process of its own. Before each, the model's files leave the page cache. With arguments, e.g. 7b 64
disk, only that is run, and the table is only printed. TMPDIR should be on a disk.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import show_result, write_result
from benchmarks.quantized_model import write_quantized_model
from safetrain.core.memory.estimate import beyond_limit_bytes, predicted_peak, total_bytes
from safetrain.core.memory.terms import Setup
from safetrain.core.model.files import read_model_files
from safetrain.core.records.settings import Shape, TrainSettings
from safetrain.engine.child_process import limit_memory
from safetrain.engine.cpu.blas import load_fast_blas
from safetrain.guard.ranks import cores_of_each, free_ports
from tests.support.settings import SETTINGS

QWEN: dict[str, Any] = {"model_type": "qwen2", "head_dim": 64, "max_position_embeddings": 32768, "vocab_size": 151_936}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {**QWEN, "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864,
             "num_attention_heads": 14, "num_key_value_heads": 2},
    "7b": {"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768,
           "tie_word_embeddings": False, "max_position_embeddings": 32768},
    "14b": {**QWEN, "hidden_size": 5120, "num_hidden_layers": 48, "intermediate_size": 13824, "head_dim": 128,
            "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152_064, "tie_word_embeddings": False},
}  # fmt: skip
SHAPES["32b"] = {**SHAPES["14b"], "num_hidden_layers": 64, "intermediate_size": 27648}
SHAPES["7b, 4 of 32 blocks"] = {**SHAPES["7b"], "num_hidden_layers": 4}
CASES = (("0.5b", 256), ("7b, 4 of 32 blocks", 64))
MIB, SPARE_BYTES = 2**20, 700 * 2**20  # private memory outside of mlx: Python, libraries, arenas of malloc
PROMISED_GIB = {("32b", 256): 4.0}  # a hard limit that was asked for
MODES, IN_TURN = ("memory", "memory, recomputed", "disk"), "disk, blocks read when needed"
RANKED = "disk, two ranks"  # on this machine, each with a row


def settings_of(folder: Path, mode: str) -> TrainSettings:
    """The settings of a measurement."""
    lora = dataclasses.replace(SETTINGS.lora, rank=8, num_layers=read_model_files(folder).num_layers)
    return dataclasses.replace(
        SETTINGS, dequantize_base=False, batch_size=1, gradient_accumulation=1, max_seq_length=8192, lora=lora,
        stream_base=mode.startswith("disk"), gradient_checkpointing=mode != "memory",
    )  # fmt: skip


def predicted(folder: Path, mode: str, tokens: int) -> tuple[int, int]:
    """The peak of mlx's allocator by the closed form, and the limit for it."""
    settings, files = settings_of(folder, mode), read_model_files(folder)
    shape, setup = Shape(1, tokens, tokens, tokens, tokens), Setup(files, settings, "cpu")
    peak = total_bytes(predicted_peak(setup, shape))
    return peak, peak - beyond_limit_bytes(setup, shape)


def step(folder: Path, name: str, mode: str, tokens: int) -> dict[str, Any]:
    """Make one step in this process; with the base on disk under a hard limit."""
    peak, limit = predicted(folder, mode, tokens)
    promised = PROMISED_GIB.get((name, tokens))
    hard = peak + SPARE_BYTES if promised is None else int(promised * 2**30)
    if mode.startswith("disk"):
        limit_memory(hard)
    load_fast_blas()
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from safetrain.core.data.token_rows import TokenRows, token_row
    from safetrain.core.data.training_rows import Cursor
    from safetrain.engine.adapters import set_adapter_weights
    from safetrain.engine.batches import BatchLayout, update_at
    from safetrain.engine.model import Blocks
    from safetrain.engine.optimizer import apply_gradient, optimizer_of
    from safetrain.engine.ranks import ALONE, join
    from safetrain.engine.update import measure, prepare
    from safetrain.engine.weight_files import save_arrays

    ranks = join("ring") if mode == RANKED else ALONE
    mx.set_memory_limit(limit)
    if mode == IN_TURN:
        at_hand = Blocks.at_hand
        setattr(Blocks, "at_hand", lambda blocks, number, _following=None: at_hand(blocks, number))  # noqa: B010
    settings = settings_of(folder, mode)
    model, gradients = prepare(folder, settings)
    mx.random.seed(11)
    weights = tree_flatten(model.module.trainable_parameters())
    set_adapter_weights(model, {name: array + 0.01 * mx.random.normal(array.shape) for name, array in weights})
    del weights  # else the first adapter stays in memory
    optimizer = optimizer_of(settings)
    optimizer.init(model.module.trainable_parameters())
    mx.eval(model.module.trainable_parameters(), optimizer.state)
    model.module.train()
    draw = np.random.default_rng(5)
    data = TokenRows.of([token_row(draw.integers(5, 2048, tokens + 1).tolist(), [True] * (tokens + 1))] * ranks.size)
    update = update_at(data, Cursor(0, 0), 0, ranks.size, BatchLayout(tokens), ranks.rank, ranks.size)
    before, began, worked = read_so_far(), time.perf_counter(), time.process_time()
    loss, gradient = gradients.of(update, 0)
    gradient = ranks.sum_gradient(gradient, 0) if ranks.together else gradient
    summed, norm = measure(loss, gradient)
    summed = ranks.total(0, 0, summed)[0] if ranks.together else summed
    read, digest = read_so_far() - before, hashlib.sha256(repr(summed).encode())
    for _, array in tree_flatten(gradient):
        digest.update(np.array(array).tobytes())
    apply_gradient(model, optimizer, gradient, norm, 1e-4, 1.0)
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    with tempfile.TemporaryDirectory() as scratch:
        save_arrays(Path(scratch) / "adapters.safetensors", dict(tree_flatten(model.module.trainable_parameters())))
        save_arrays(Path(scratch) / "optimizer.safetensors", dict(tree_flatten(optimizer.state)))
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    most = int(lines["VmHWM"].split()[0]) // 1024
    return {
        "bits": digest.hexdigest()[:12], "seconds": seconds, "cpu": cpu, "read": read / 2**30, "process": most,
        "mlx": mx.get_peak_memory() / MIB, "predicted": peak / MIB, "limit": hard / MIB,
    }  # fmt: skip


def read_so_far() -> int:
    """Bytes that this process has read, from the disk or the file cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def measured(folder: Path, name: str, mode: str, tokens: int) -> list[dict[str, Any]]:
    """The step in a process of its own, or in one for each rank."""
    os.sync()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            if sys.platform == "linux":  # macOS has none
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-m", "benchmarks.bench_stream", "--step", str(folder), name, mode, str(tokens)]
    if mode != RANKED:
        return [json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)]
    hosts = folder.with_name("hosts.json")
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    environment = {**os.environ, **cores_of_each(2), "MLX_HOSTFILE": str(hosts)}
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env={**environment, "MLX_RANK": str(rank)})
        for rank in range(2)
    ]
    return [json.loads(rank.communicate()[0]) for rank in ranks]


def main(arguments: list[str]) -> None:
    """Measure all cases, or make one step."""
    if arguments[:1] == ["--step"]:
        print(json.dumps(step(Path(arguments[1]), arguments[2], arguments[3], int(arguments[4]))))
        return
    cases = ((arguments[0], int(arguments[1])),) if arguments else CASES
    header = ["model", "tokens", "base", "loss and gradient", "process MiB", "mlx MiB (predicted)",
              "hard limit MiB", "read GiB", "seconds (CPU)"]  # fmt: skip
    table: list[list[object]] = []
    for name, tokens in cases:
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_quantized_model(Path(scratch) / "model", **SHAPES[name])
            measures = ((mode, one) for mode in arguments[2:] or MODES for one in measured(folder, name, mode, tokens))
            for mode, one in measures:
                limit = f"{one['limit']:,.0f}" if mode.startswith("disk") else "none"
                table.append([
                    name, tokens, mode, one["bits"], f"{one['process']:,}",
                    f"{one['mlx']:,.0f} ({one['predicted']:,.0f})",
                    limit, f"{one['read']:.2f}", f"{one['seconds']:.0f} ({one['cpu']:.0f})",
                ])  # fmt: skip
    what = "A step with the base in memory and on disk"
    notes = (
        "Loss and gradient as a hash: the same bits. Peaks of the process include opening the model and saving; mlx's "
        "are of the step. Seconds include what else ran on the two cores.",
    )
    (show_result if arguments else write_result)("bench_stream", what, header, table, notes)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The parts of benchmarks/first_contact, each a function from a folder and a size to what it found.

``python -m benchmarks.first_contact_parts PART OUT SIZE`` prints one line of JSON. Without a GPU, a part that computes
takes the GPU's way on the CPU: rectangles in place of packed rows, no kernels for them.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_stream import SHAPES
from benchmarks.bench_throughput import Failed, Prepared, prepare, prepared_case, train_mlx_lm, train_ours
from benchmarks.throughput_cases import ROOT, Case
from safetrain.core.records.run_state import NAME
from safetrain.core.storage.paths import CHECKPOINTS
from safetrain.engine.child_process import die_with_parent
from safetrain.engine.cpu.blas import load_fast_blas

Found = dict[str, Any]
HALF_BILLION = {**SHAPES["0.5b"], "bfloat16": True}
LITTLE = {**SHAPES["0.5b"], "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 704,
          "num_attention_heads": 4, "vocab_size": 16384}  # fmt: skip
TITLE = "0.5B in 4 bits, 8 rows of 300 tokens in the middle"
CASES = {
    "gpu": Case("first", TITLE, 512, 8, 240, 30, 60.0, median=300, spread=0.5, changes=HALF_BILLION, for_torch=False),
    "small": Case(
        "first", "4 rows of 60 tokens", 128, 4, 120, 5, 10.0, median=60, spread=0.5, changes=LITTLE, for_torch=False
    ),
    "tiny": Case("first", "a rehearsal", 48, 2, 8, 2, 1.0, median=30, spread=0.2, changes={
        **LITTLE, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 1,
        "num_key_value_heads": 1, "vocab_size": 4096}),
}  # fmt: skip
WIDTHS = {"gpu": (2048, 8192, 1000), "small": (512, 1000), "tiny": (128, 100)}  # of attention
UPDATES = {"gpu": (30, 3), "small": (10, 3), "tiny": (2, 2)}  # on the device, and on the CPU beside it
LENGTHS = {"gpu": (700, 250, 120, 33), "small": (250, 120, 33), "tiny": (60, 33)}
TOLERANCE = 1e-3  # relative, of a gradient in float32


def machine(out: Path, size: str) -> Found:
    """Versions, and what the driver says."""
    smi = shutil.which("nvidia-smi")
    asked = ["--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
    driver = subprocess.run([smi, *asked], capture_output=True, text=True, check=False).stdout if smi else "none"
    versions = {name: importlib.metadata.version(name) for name in ("safetrain", "mlx", "mlx-lm")}
    system, python = platform.platform(), platform.python_version()
    return {"system": system, "python": python, "nvidia-smi": driver.strip(), **versions}


def probe(out: Path, size: str) -> Found:
    """What preflight asks a child."""
    answer = _said([sys.executable, "-m", "safetrain.engine.dry_run"])
    return json.loads(answer.splitlines()[-1])


def selftest(out: Path, size: str) -> Found:
    """The text that README asks for."""
    return {"report": _said([sys.executable, "-m", "safetrain.cli", "selftest", "--report"]).strip("`\n")}


def gradients(out: Path, size: str) -> Found:
    """Heads of 64 and 128, float and quantized, in float32, and in bfloat16, which rounds."""
    from safetrain.engine.batches import training_layout
    from tests.engine.exact import distance, loss_and_gradient, prepared, rows_of
    from tests.support.random_models import build_model
    from tests.support.settings import SETTINGS

    cases, found, data = [(64, None), (64, 4), (128, 4)], list[Found](), rows_of(*LENGTHS[size])
    for head, bits in cases if size != "tiny" else cases[1:2]:
        shape: Found = {"hidden_size": 4 * head, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head}
        folder = build_model(_new(out / "gradients"), bits=bits, **shape)
        with _on_cpu():
            expected, other = loss_and_gradient(*prepared(folder), data)
        for dtype in ("float32", "bfloat16") if size == "gpu" else ("float32",):
            settings = dataclasses.replace(SETTINGS, dequantize_base=False, compute_dtype=dtype)
            with _on_gpu():
                model, ours = prepared(folder, settings)
                loss, gradient = loss_and_gradient(model, ours, data, training_layout(model, 2, data))
            apart = distance(gradient, other)
            found.append({
                "heads of": head, "bits": str(bits), "type": dtype, "loss apart": abs(loss / expected - 1),
                "gradient apart": apart, f"within {TOLERANCE:g}": "yes" if apart <= TOLERANCE else "no",
            })  # fmt: skip
    exact = [row for row in found if row["type"] == "float32"]
    apart = float(np.max([(row["loss apart"], row["gradient apart"]) for row in exact]))
    return {"cases": found} | _failed_if_far(apart, "in float32 it differs from the CPU's")


def train(out: Path, size: str) -> Found:
    """The stages: plan, dry run, and one epoch of updates."""
    case = _case(out, size)
    shutil.rmtree(case.scratch / "ours", ignore_errors=True)
    measured, output = train_ours(case), case.scratch / "ours" / "checkpoints_qlora"
    plan, run = (_json(output / f"{name}.json") for name in ("recommended_config", "training_summary"))
    chosen = ("dequantize_base", "gradient_checkpointing", "labels_at_once", "padding_tokens", "compute_dtype")
    return {
        "tokens per second": measured.rate, "updates": measured.updates, "seconds of updates": measured.seconds,
        "predicted peak, MiB": plan["predicted_peak_bytes"] // 2**20,
        "dry run, MiB": (plan["measured"] or {}).get("peak_bytes", 0) // 2**20,
        "measured peak, MiB": run["peak_memory_bytes"] // 2**20, "padding": measured.padding,
        "first and last validation": f"{run['base_valid_loss']:.4f}, {run['best_valid_loss']:.4f}",
        **{key: str(plan["settings"][key]) for key in chosen},
    }  # fmt: skip


def peer(out: Path, size: str) -> Found:
    """mlx_lm.lora, in the same minutes on the same device."""
    measured = train_mlx_lm(_case(out, size))
    ours = _json(out / "first_contact.json")["parts"].get("train", {}).get("tokens per second")
    return {
        "tokens per second": measured.rate, "safetrain's": f"{ours / measured.rate:.2f} x" if ours else "not measured",
        "updates": measured.updates, "padding": measured.padding, "peak, MiB": (measured.mlx_bytes or 0) // 2**20,
    }  # fmt: skip


def attention(out: Path, size: str) -> Found:
    """Milliseconds, peak and difference of one layer of 16 heads of 64 on 8 key heads."""
    import mlx.core as mx

    from benchmarks.timing import fastest
    from safetrain.engine import row_attention

    def measured(parts: list[mx.array]) -> tuple[float, float, mx.array]:
        def both() -> Any:
            return mx.vjp(functools.partial(row_attention.padded_attention, scale=0.125), parts[:3], parts[3:])

        mx.reset_peak_memory()
        return fastest(both, 3), mx.get_peak_memory() / 2**20, both()[1][0].astype(mx.float32)

    found, has_kernel = list[Found](), row_attention.has_gradient_kernel
    for width in WIDTHS[size]:
        with _on_gpu():
            dtype = mx.float32 if mx.default_device().type == mx.DeviceType.cpu else mx.bfloat16
            parts = [mx.random.normal((1, heads, width, 64)).astype(dtype) for heads in (16, 8, 8, 16)]
            mx.eval(parts)
            kernel, peak, one = measured(parts)
            setattr(row_attention, "has_gradient_kernel", lambda *_: False)  # noqa: B010
            tiles, other_peak, other = measured(parts)
            setattr(row_attention, "has_gradient_kernel", has_kernel)  # noqa: B010
        apart = float(mx.linalg.norm(one - other) / mx.linalg.norm(other))
        found.append({
            "tokens": width, "as chosen, ms": 1e3 * kernel, "tiles, ms": 1e3 * tiles,
            "tiles take": f"{tiles / kernel:.2f} x", "as chosen, MiB": peak, "tiles, MiB": other_peak,
            "gradient apart": apart,
        })  # fmt: skip
    return {"shapes": found}


def losses(out: Path, size: str) -> Found:
    """The same updates of a small model on the CPU and on the device in float32; then the device alone, at its size.

    Beside a CUDA wheel, a CPU has no fast BLAS.
    """
    near, (many, few) = _case(out, "small" if size == "gpu" else size), UPDATES[size]
    with _on_cpu():
        expected = _updates(near, few)
    with _on_gpu():
        exact = _updates(near, few, compute_dtype="float32")
        found = {"cpu, float32": expected, "device, float32": exact}
        if size != "tiny":
            found[f"device, {CASES[size].title}"] = _updates(_case(out, size), many)
    rows = [{
        "way": way, "first losses": ", ".join(f"{loss:.5f}" for loss in each["losses"][:few]),
        "last": each["losses"][-1], "seconds an update": each["seconds"], "peak, MiB": each["peak"],
    } for way, each in found.items()]  # fmt: skip
    apart = max(abs(np.divide(exact["losses"], expected["losses"]) - 1))
    return {"losses in float32 apart": float(apart), "ways": rows} | _failed_if_far(apart, "a loss in float32 differs")


def disk(out: Path, size: str) -> Found:
    """The base in memory, and on disk under the limit that is predicted for it: the same losses."""
    case, (_, few), found = _case(out, size), UPDATES[size], list[Found]()
    with _on_gpu():
        for stream in (False, True):
            each = _updates(case, few, stream_base=stream, gradient_checkpointing=True, dequantize_base=False)
            found.append({
                "base": "on disk" if stream else "in memory", "loss": each["losses"][-1], "peak, MiB": each["peak"],
                "predicted, MiB": each["predicted"], "seconds an update": each["seconds"],
            })  # fmt: skip
    apart, over = abs(found[0]["loss"] / found[1]["loss"] - 1), found[1]["peak, MiB"] - found[1]["predicted, MiB"]
    wrong = {"failed": f"{over:.1f} MiB over the predicted limit"} if over > 1 else {}
    return {"ways": found, "losses apart": apart} | wrong | _failed_if_far(apart, "the losses differ")


def kill(out: Path, size: str) -> Found:
    """A training of the stages, whole, and killed after its first checkpoint and continued: the adapters' bytes.

    At the size of a GPU that of the case, whose types and heads have mlx's kernels; else the example's.
    """
    words = [f"train.max_steps={12 if size == 'tiny' else 24}", "train.save_steps=4", "train.eval_steps=6"]
    if size == "gpu":
        case = _case(out, size)
        words += [f"model.path={case.model}", f"data.path={case.scratch / 'data'}", "train.max_seq_length=256"]
    whole, killed = (_new(out / "kill") / name for name in ("whole", "killed"))
    for name in ("params.yaml", "dvc.yaml", "conf", "data/example", "models/encyclopedia-3m"):
        source, target = ROOT / name, whole / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    for stage in ("validate_data", "preflight", "recommend_config"):
        _said(_stage(stage, words), whole)
    shutil.copytree(whole, killed)
    _said(_stage("train", words), whole)
    _kill_at_first_checkpoint(_stage("train", words), killed)
    _said(_stage("train", words), killed)
    summary = _json(killed / "checkpoints_qlora" / "training_summary.json")
    adapters = [folder / "checkpoints_qlora" / "adapters" / "adapters.safetensors" for folder in (whole, killed)]
    equal, step = len({path.read_bytes() for path in adapters}) == 1, summary["resumed_from_step"]
    found = {"continued from step": step, "of": summary["steps"], "equal to the bit": str(equal)}
    return found | ({} if equal and step else {"failed": "not the same adapter"})


def _kill_at_first_checkpoint(command: list[str], folder: Path) -> None:
    with (folder / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=folder, env=_here(), stdout=log, stderr=log, start_new_session=True)
        while run.poll() is None and not any(NAME.match(each.name) for each in folder.glob(f"*/{CHECKPOINTS}")):
            time.sleep(0.05)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def _updates(case: Prepared, count: int, **changes: Any) -> Found:
    """Updates of the case's rows in its order: mean losses, seconds of the fastest update, predicted and real peak."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from safetrain.core.data.token_rows import TokenRows, token_row
    from safetrain.core.memory.estimate import beyond_limit_bytes, predicted_peak, total_bytes
    from safetrain.core.memory.terms import Setup, width_of
    from safetrain.core.model.files import read_model_files
    from safetrain.core.records.settings import Shape
    from safetrain.engine.adapters import set_adapter_weights
    from safetrain.engine.backend import device, name_now
    from safetrain.engine.batches import fill, training_layout, update_of_rows
    from safetrain.engine.optimizer import apply_gradient, optimizer_of
    from safetrain.engine.update import measure, prepare
    from tests.support.settings import SETTINGS

    files, size = read_model_files(case.model), case.case.batch_size
    lora = dataclasses.replace(SETTINGS.lora, rank=8, num_layers=files.num_layers)
    plain = {"batch_size": size, "gradient_accumulation": 1, "max_seq_length": case.case.max_tokens, "lora": lora}
    asked: dict[str, Any] = {"dequantize_base": device().on_cpu, **plain, **changes}
    settings, written = dataclasses.replace(SETTINGS, **asked), _json(case.scratch / "rows.json")
    data = TokenRows.of([token_row(row["ids"], [label >= 0 for label in row["labels"]]) for row in written])
    longest = width_of(int(data.inputs().max()), rectangles=not device().on_cpu)
    tokens = size * longest
    setup, shape = Setup(files, settings, name_now()), Shape(size, longest, tokens, tokens, tokens)
    predicted = total_bytes(predicted_peak(setup, shape))
    before = mx.set_memory_limit(max(1, predicted - beyond_limit_bytes(setup, shape)))
    model, ours = prepare(case.model, settings)
    mx.random.seed(11)
    weights = tree_flatten(model.module.trainable_parameters())
    set_adapter_weights(model, {name: array + 0.01 * mx.random.normal(array.shape) for name, array in weights})
    del weights
    optimizer, layout = optimizer_of(settings), training_layout(model, size, data)
    optimizer.init(model.module.trainable_parameters())
    model.module.train()
    means, seconds, peak = list[float](), list[float](), 0
    for step in range(count):
        rows = sorted(
            (row % len(data) for row in range(step * size, (step + 1) * size)), key=lambda row: -len(data[row])
        )
        update = update_of_rows(data, list(fill(data, rows, layout)), layout)
        mx.reset_peak_memory()
        began = time.perf_counter()
        loss, gradient = ours.of(update, step)
        summed, norm = measure(loss, gradient)
        apply_gradient(model, optimizer, gradient, norm, 1e-4, 1.0)
        mx.eval(model.module.trainable_parameters(), optimizer.state)
        seconds.append(time.perf_counter() - began)
        means.append(float(np.float32(summed)) / update.labels)
        peak = max(peak, mx.get_peak_memory())
    mx.set_memory_limit(before)
    del model, ours, optimizer, gradient, loss  # in a cycle: they would count in the next peak
    gc.collect()
    mx.clear_cache()
    return {"losses": means, "seconds": min(seconds), "peak": peak / 2**20, "predicted": predicted / 2**20}


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    import mlx.core as mx

    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        yield
    finally:
        mx.set_default_device(before)


@contextlib.contextmanager
def _on_gpu() -> Iterator[None]:
    """The GPU; without one the CPU, in a GPU's way but uncompiled: a C++ compiler would build each kernel."""
    import mlx.core as mx

    from safetrain.engine import backend

    known = backend.name_now
    if mx.default_device().type == mx.DeviceType.cpu:
        backend.name_now = lambda: "cuda"
        mx.disable_compile()
    try:
        yield
    finally:
        backend.name_now = known


def _case(out: Path, size: str) -> Prepared:
    """The model and rows of a size, made once."""
    scratch = out / size
    if not (scratch / "rows.json").is_file():
        return prepare(CASES[size], _new(scratch))
    return prepared_case(CASES[size], scratch)


def _failed_if_far(apart: float, what: str) -> Found:
    """Also NaN is far."""
    return {} if apart <= TOLERANCE else {"failed": what}


def _new(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _stage(name: str, words: list[str]) -> list[str]:
    return [sys.executable, "-m", f"stages.{name}", *words]


def _here() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def _said(command: list[str], folder: Path = ROOT) -> str:
    """What a command prints; raises Failed."""
    done = subprocess.run(command, cwd=folder, env=_here(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(command[1:4])}: exit code {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    return done.stdout


PARTS: dict[str, Callable[[Path, str], Found]] = {
    each.__name__: each
    for each in (machine, probe, selftest, gradients, train, attention, losses, kill, disk, peer)
}  # fmt: skip


if __name__ == "__main__":
    die_with_parent(os.getppid())
    load_fast_blas()
    try:
        print(json.dumps(PARTS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])), flush=True)
    except Failed as error:
        print(json.dumps({"failed": " ".join(str(error).split())}), flush=True)

"""Every architecture that mlx-lm has: its self-test, a short training, and its adapter as mlx-lm opens it.

Each is a small model with random weights in a process of its own, under a memory limit. Names of families after the
command: those alone, and no file is written.
"""

import dataclasses
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import show_result, write_result
from safetrain.engine.child_process import limit_memory
from safetrain.plan.child import run_lines
from safetrain.plan.preflight import judge
from tests.support.families import build_family, families

LIMIT_BYTES, SECONDS, AT_A_TIME = 4 * 2**30, 240.0, 3
ROWS, TOKENS, UPDATES, RATE = 3, 40, 2, 1e-2
LEAST_CHANGE, MOST_DIFFERENCE = 1e-6, 1e-3  # of logits, relative to the largest
HEADER = ["family", "loss, gradient as the reference", "rows", "adapter in mlx-lm", "counted", "refused"]


def main() -> None:
    """A row a family."""
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], Path(sys.argv[3]))
        return
    asked = sys.argv[1:] or families()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = dict(zip(asked, pool.map(told, asked), strict=True))
    rows: list[list[object]] = [row_of(family, said) for family, said in found.items()]
    show = show_result if sys.argv[1:] else write_result
    show("bench_families", "Families: what trains, and what mlx-lm makes of it", HEADER, rows, notes(found))


def told(family: str) -> dict[str, Any]:
    """What the child said of a family before it ended, and how it ended where that was badly."""
    with tempfile.TemporaryDirectory() as scratch:
        lines, ended = run_lines("benchmarks.bench_families", ["--one", family, scratch], SECONDS)
    said: dict[str, Any] = {"ended": ended} if ended else {}
    for line in lines:
        if line.startswith("{"):
            said |= json.loads(line)
    print(family, said, file=sys.stderr, flush=True)
    return said


def one(family: str, scratch: Path) -> None:
    """Say what is found, as it is found."""
    limit_memory(LIMIT_BYTES)
    from safetrain.engine.cpu.blas import load_fast_blas

    load_fast_blas()
    from safetrain.core.errors import SafetrainError
    from safetrain.engine.upstream.loading import FOREIGN

    for step in (_build, _examine, _train):
        try:
            step(family, scratch)
        except SafetrainError as error:
            _say(refused=error.what)
            return
        except FOREIGN as error:
            _say(refused=f"{step.__name__[1:]}: {type(error).__name__}: {error}")
            return
        except SystemExit:
            _say(refused="mlx-lm needs a package for this model that is not installed.")
            return


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def _build(family: str, scratch: Path) -> None:
    import mlx.core as mx

    build_family(scratch / "model", family)
    tensors = mx.load(str(scratch / "model" / "model.safetensors"))
    assert isinstance(tensors, dict)
    _say(parameters=sum(tensor.size for tensor in tensors.values()))


def _examine(_family: str, scratch: Path) -> None:
    from safetrain.core.errors import ModelError
    from safetrain.core.model.files import read_model_files
    from safetrain.engine.model import open_base
    from safetrain.engine.selftest import examine, training_fault

    _say(counted=read_model_files(scratch / "model").parameters)
    model = open_base(scratch / "model", dequantize=False)
    _say(why_padded=model.packing_refusal)
    if fault := training_fault(model):
        raise ModelError(fault)
    del model
    _say(**examine(scratch / "model", ROWS, TOKENS))


def _train(_family: str, scratch: Path) -> None:
    """Two updates; the saved adapter opened by mlx-lm gives the logits that it gives here."""
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_adapters, load_model

    from safetrain.core.data.training_rows import Cursor
    from safetrain.core.memory.terms import lora_parameters
    from safetrain.core.model.files import read_model_files
    from safetrain.core.records.settings import SMALLEST, LoraSettings
    from safetrain.engine.adapters import adapted_names
    from safetrain.engine.batches import training_layout, update_at
    from safetrain.engine.model import open_base
    from safetrain.engine.optimizer import apply_gradient, optimizer_of
    from safetrain.engine.selftest import random_rows
    from safetrain.engine.update import measure, prepare
    from safetrain.engine.weight_files import apply_adapter, save_adapter

    folder, files = scratch / "model", read_model_files(scratch / "model")
    model = open_base(folder, dequantize=False)
    lora = LoraSettings(4, 2.0, 0.0, max(1, len(model.module.layers) // 2), ("all-linear",))
    settings = dataclasses.replace(SMALLEST, batch_size=ROWS, max_seq_length=TOKENS, lora=lora)
    prompt = mx.array([[5, 9, 13, 21, 34]])
    before = np.array(model.module(prompt).astype(mx.float32))
    model, gradients = prepare(folder, settings)
    _say(
        made=sum(value.size for _, value in tree_flatten(model.module.trainable_parameters())),
        estimated=lora_parameters(files, lora),
        keys=adapted_names(model),
    )
    optimizer = optimizer_of(settings)
    optimizer.init(model.module.trainable_parameters())
    data = random_rows(ROWS, TOKENS, files.vocab_size)
    layout = training_layout(model, ROWS, data)
    for number in range(UPDATES):
        model.module.train()
        loss, gradient = gradients.of(update_at(data, Cursor(0, 0), 1, ROWS, layout), number)
        apply_gradient(model, optimizer, gradient, measure(loss, gradient)[1], RATE, 1.0)
        mx.eval(model.module.trainable_parameters(), optimizer.state)
    save_adapter(model, "lora", lora, folder, scratch / "adapters")
    ours = open_base(folder, dequantize=False)
    apply_adapter(ours, scratch / "adapters")
    here = np.array(ours.module(prompt).astype(mx.float32))
    opened = load_adapters(load_model(folder)[0], str(scratch / "adapters"))
    there = np.array(opened(prompt).astype(mx.float32))
    size = float(np.abs(here).max())
    _say(changed=float(np.abs(here - before).max()) / size, apart=float(np.abs(here - there).max()) / size)


def row_of(family: str, said: dict[str, Any]) -> list[object]:
    """Of the table."""
    return [family, exactness(said), layout_of(said), adapter_of(said), counts(said), obstacle(said)]


def exactness(said: dict[str, Any]) -> str:
    """How far from mlx-lm's own layers and a plain cross-entropy."""
    if "loss_difference" not in said:
        return "-"
    failed = [name for name, _, passed in judge(said) if not passed]
    figures = f"{said['loss_difference']:.0e}, {said['gradient_difference']:.0e}"
    return f"no: {', '.join(failed)} ({figures})" if failed else f"yes ({figures})"


def layout_of(said: dict[str, Any]) -> str:
    """As one list, or padded and why."""
    if "packs_rows" not in said:
        return "-"
    return "one list" if said["packs_rows"] else f"padded: {said.get('why_padded', '')}"


def adapter_of(said: dict[str, Any]) -> str:
    """Whether mlx-lm opens the trained adapter, and to the same logits."""
    if "apart" not in said:
        return "-"
    if said["changed"] < LEAST_CHANGE:
        return "no: it changes nothing"
    return "same logits" if said["apart"] <= MOST_DIFFERENCE else f"no: logits {said['apart']:.0e} apart"


def counts(said: dict[str, Any]) -> str:
    """Parameters and adapter by the headers, against what there is."""
    if "made" not in said:
        return "-"
    wrong = []
    if said["counted"] != said["parameters"]:
        wrong.append(f"parameters {said['counted']} for {said['parameters']}")
    if said["estimated"] != said["made"]:
        wrong.append(f"adapter {said['estimated']} for {said['made']}")
    return "; ".join(wrong) or "right"


def obstacle(said: dict[str, Any]) -> str:
    """What it ended with."""
    text = str(said.get("refused") or said.get("ended") or "").splitlines()
    return text[0][:160].replace("|", "/") if text else ""


def notes(found: dict[str, dict[str, Any]]) -> list[str]:
    """The table in a sentence."""
    rows = [row_of(family, said) for family, said in found.items()]
    trains = sum(str(row[1]).startswith("yes") for row in rows)
    lists, same = sum(row[2] == "one list" for row in rows), sum(row[3] == "same logits" for row in rows)
    right = sum(row[4] == "right" for row in rows)
    return [
        f"{len(rows)} families: {trains} pass the self-test, {lists} of them as one list without padding; the trained "
        f"adapters of {same} give the same logits in mlx-lm; parameters and adapter of {right} are counted right.",
        f"Small models with random weights in float32 ({ROWS} rows of up to {TOKENS} tokens), each in a process that "
        f"may take {LIMIT_BYTES // 2**30} GiB. Loss and gradient: largest relative differences.",
    ]


if __name__ == "__main__":
    main()

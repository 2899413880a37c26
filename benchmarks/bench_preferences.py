"""DPO and ORPO step by step beside TRL's trainers.

    python -m benchmarks.bench_preferences PYTHON     # an interpreter that has trl, torch, transformers, peft, datasets

A tiny random Llama in float32; the same pairs in the same order, and the same LoRA weights, which PEFT reads from our
export. For ORPO, prompts are one token and chosen answers equally long: TRL's likelihood includes the prompt and is a
mean over tokens; ours, as in the paper, is a mean over answers. Then one epoch of DPO on the example's pairs, with
the example's base in float32: accuracy on its test pairs.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import write_result
from safetrain.core.data.store import open_store, store_path
from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.records.settings import TrainSettings
from safetrain.data.validate import validate
from safetrain.engine.cpu.blas import load_fast_blas
from safetrain.engine.loss import PairLoss
from tests.support.random_models import TINY, build_model
from tests.support.settings import SETTINGS

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "models" / "encyclopedia-3m"
STEPS, PAIRS, END, VOCABULARY = 30, 4, 3, 2048
PEER = Path(__file__).with_name("preferences_peer_trl.py")


def pairs_of(prompt: int, answer: int, count: int) -> TokenRows:
    """Random pairs whose answers end with a stop token."""
    source, rows = np.random.default_rng(1), []
    for _ in range(count):
        ids = source.integers(5, VOCABULARY, prompt if prompt == 1 else int(source.integers(2, prompt))).tolist()
        for is_rejected in (0, 1):
            size = int(source.integers(1, answer)) if is_rejected or prompt > 1 else answer
            own = [*source.integers(5, VOCABULARY, size).tolist(), END]
            rows.append(token_row([*ids, *own], [False] * len(ids) + [True] * len(own)))
    data = TokenRows.of(rows)
    return TokenRows(data.ids, data.trained, data.starts, data.lengths, data.label_counts, rows_per_pair=2)


def ours(
    settings: TrainSettings, base: Path, data: TokenRows, out: Path, pairs: int = PAIRS, test: TokenRows | None = None
) -> dict[str, Any]:
    """Loss and gradient norm of each step; writes the first adapter for PEFT. Also seconds, memory, and test scores."""
    import mlx.core as mx

    from safetrain.engine.adapters import adapter_weights
    from safetrain.engine.batches import fill, training_layout, update_of_rows
    from safetrain.engine.evaluation import row_losses
    from safetrain.engine.optimizer import apply_gradient, optimizer_of
    from safetrain.engine.update import measure, prepare
    from safetrain.engine.weight_files import save_adapter
    from safetrain.export.peft import write_peft

    model, gradients = prepare(base, settings)
    if not out.exists():
        out.mkdir()
        save_adapter(model, "lora", settings.lora, base, out.with_name("own"))
        write_peft(out.with_name("own"), adapter_weights(model), str(base), out)
    layout = training_layout(model, settings.batch_size, data)
    began = time.perf_counter()
    data.references = -row_losses(model, data, layout.most_tokens).astype(np.float32)
    before = None if test is None else -row_losses(model, test, layout.most_tokens)
    reference, steps, optimizer = time.perf_counter() - began, [], optimizer_of(settings)
    optimizer.init(model.module.trainable_parameters())
    mx.reset_peak_memory()
    began = time.perf_counter()
    for step in range(len(data) // 2 // pairs):
        rows = data.of_update(np.arange(2 * pairs * step, 2 * pairs * (step + 1))).rows
        update = update_of_rows(data, list(fill(data, rows, layout)), layout)
        model.module.train()
        loss, gradient = gradients.of(update, step)
        summed, norm = measure(loss, gradient)
        steps.append([summed / update.labels, norm])
        apply_gradient(model, optimizer, gradient, norm, settings.learning_rate, settings.max_grad_norm)
    seconds = time.perf_counter() - began
    found = {"steps": steps, "seconds": seconds, "reference": reference, "mib": mx.get_peak_memory() / 2**20}
    if test is not None:
        model.module.eval()
        sums = -row_losses(model, test, layout.most_tokens)
        margins = PairLoss("dpo", settings.beta).scores(sums, test, before).margins
        found |= {"accuracy": float((margins > 0).mean()), "margin": float(margins.mean())}
    return found


def beside_trl(python: str, method: str) -> list[object]:
    """A row of the table: the largest relative differences from TRL over all steps."""
    settings = dataclasses.replace(SETTINGS, method=method, dequantize_base=False, learning_rate=1e-3,
                                   batch_size=2 * PAIRS, gradient_accumulation=1)  # fmt: skip
    data = pairs_of(1 if method == "orpo" else 20, 12, STEPS * PAIRS)
    with tempfile.TemporaryDirectory() as scratch:
        base, adapter = build_model(Path(scratch) / "base", **TINY), Path(scratch) / "peft"
        own = np.array(ours(settings, base, data, adapter)["steps"])
        theirs = np.array(trl(python, settings, base, adapter, texts_of(data))["steps"])
    apart = np.abs(own - theirs) / np.abs(theirs)
    return [method, STEPS, *(f"{own[place][0]:.6f} / {theirs[place][0]:.6f}" for place in (0, -1)),
            f"{apart[:, 0].max():.1e}", f"{apart[:, 1].max():.1e}"]  # fmt: skip


def texts_of(data: TokenRows) -> list[dict[str, str]]:
    """The pairs for TRL: each token is a word. TRL adds the stop token."""
    rows = []
    for pair in range(len(data) // 2):
        chosen, rejected = data[2 * pair], data[2 * pair + 1]
        ids = chosen.ids[~chosen.trained], *(row.ids[row.trained][:-1] for row in (chosen, rejected))
        texts = (" ".join(map(str, each.tolist())) for each in ids)
        rows.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)))
        rows[-1]["prompt"] += " "
    return rows


def trl(
    python: str, settings: TrainSettings, base: Path, adapter: Path, rows: list[dict[str, str]],
    test: list[dict[str, str]] | None = None, end: int = END,
) -> dict[str, Any]:  # fmt: skip
    """What TRL's trainer measures on the same job, in a process of its own."""
    job = {"base": str(base), "adapter": str(adapter), "out": str(base.with_name("out")), "method": settings.method,
           "beta": settings.beta, "rate": settings.learning_rate, "steps": len(rows) // PAIRS, "pairs": PAIRS,
           "rows": rows, "test": test, "vocabulary": VOCABULARY, "end": end}  # fmt: skip
    file = base.with_name("job.json")
    file.write_text(json.dumps(job))
    run = subprocess.run([python, str(PEER), str(file)], check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def to_the_end(python: str) -> str:
    """One epoch on the example's pairs, by both, in the same order."""
    from mlx.utils import tree_flatten

    from safetrain.engine.model import open_base
    from safetrain.engine.weight_files import save_arrays

    settings = dataclasses.replace(SETTINGS, method="dpo", dequantize_base=False, learning_rate=1e-3,
                                   batch_size=2 * PAIRS, gradient_accumulation=1)  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        validate([ROOT / "data" / "preferences.jsonl"], EMBEDDED, into=Path(scratch) / "data")
        data, test = (open_store(store_path(Path(scratch) / "data", split)).rows for split in ("train", "test"))
        base = Path(scratch) / "base"
        base.mkdir()
        config = json.loads((EMBEDDED / "config.json").read_text())
        del config["quantization"]
        (base / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (base / name).write_bytes((EMBEDDED / name).read_bytes())
        weights = tree_flatten(open_base(EMBEDDED, dequantize=True).module.parameters())
        save_arrays(base / "model.safetensors", dict(weights))
        data = data.take(data.rows_of(np.arange(len(data) // 2 // PAIRS * PAIRS)))
        own = ours(settings, base, data, Path(scratch) / "peft", test=test)
        end = int(data[0].ids[-1])
        theirs = trl(python, settings, base, Path(scratch) / "peft", texts_of(data), texts_of(test), end)
    return (
        f"DPO to the end on the example, {len(data) // 2} pairs, {len(test) // 2} test pairs, ours / TRL: accuracy "
        f"{100 * own['accuracy']:.1f} / {100 * theirs['accuracy']:.1f} %, margin {own['margin']:.3f} / "
        f"{theirs['margin']:.3f}, last loss {own['steps'][-1][0]:.4f} / {theirs['steps'][-1][0]:.4f}; "
        f"{own['seconds'] + own['reference']:.0f} / {theirs['seconds']:.0f} s; the process of TRL {theirs['mib']:,.0f} "
        f"MiB, mlx {own['mib']:,.0f} MiB."
    )


def main(python: str) -> None:
    """Compare with TRL."""
    load_fast_blas()
    table = [beside_trl(python, method) for method in ("dpo", "orpo")]
    notes = [to_the_end(python), "Losses: ours / TRL's. Differences are relative, the largest of all steps."]
    header = ["method", "steps", "first loss", "last loss", "loss apart", "gradient norm apart"]
    write_result("bench_preferences", "DPO and ORPO beside TRL", header, table, notes)


if __name__ == "__main__":
    main(sys.argv[1])

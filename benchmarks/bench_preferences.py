"""DPO and ORPO step by step beside TRL's trainers, and what the two ways to compute a pair cost.

    python -m benchmarks.bench_preferences PYTHON     # an interpreter that has trl, torch, transformers, peft, datasets

A tiny random Llama in float32; the same pairs in the same order, and the same LoRA weights, which PEFT reads from our
export. For ORPO, prompts are one token and chosen answers equally long: TRL's likelihood includes the prompt and is a
mean over tokens; ours, as in the paper, is a mean over answers.
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

from benchmarks.bench_stream import SHAPES
from benchmarks.machine import write_result
from benchmarks.quantized_model import write_quantized_model
from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.cpu.blas import load_fast_blas
from tests.support.random_models import TINY, build_model
from tests.support.settings import SETTINGS

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
    return TokenRows(data.ids, data.trained, data.starts, data.lengths, data.label_counts, unit=2)


def ours(settings: TrainSettings, base: Path, data: TokenRows, out: Path, pairs: int = PAIRS) -> dict[str, Any]:
    """Loss and gradient norm of each step; writes the first adapter for PEFT. Also seconds and the peak of mlx."""
    import mlx.core as mx

    from safetrain.engine.adapters import adapter_weights
    from safetrain.engine.batches import fill, training_layout, update_of_rows
    from safetrain.engine.evaluation import row_losses
    from safetrain.engine.exchange.peft import write_peft
    from safetrain.engine.optimizer import apply_gradient, optimizer_of
    from safetrain.engine.update import measure, prepare
    from safetrain.engine.weight_files import save_adapter

    model, gradients = prepare(base, settings)
    if not out.exists():
        out.mkdir()
        save_adapter(model, "lora", settings.lora, base, out.with_name("own"))
        write_peft(out.with_name("own"), adapter_weights(model), str(base), out)
    layout = training_layout(model, settings.batch_size, data)
    began = time.perf_counter()
    data.references = -row_losses(model, data, layout.most_tokens).astype(np.float32)
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
        steps.append([summed / update.trained_tokens, norm])
        apply_gradient(model, optimizer, gradient, norm, settings.learning_rate, settings.max_grad_norm)
    seconds = time.perf_counter() - began
    return {"steps": steps, "seconds": seconds, "reference": reference, "mib": mx.get_peak_memory() / 2**20}


def beside_trl(python: str, method: str) -> list[object]:
    """A row of the table: the largest relative differences from TRL over all steps."""
    settings = dataclasses.replace(SETTINGS, method=method, dequantize_base=False, learning_rate=1e-3,
                                   batch_size=2 * PAIRS, gradient_accumulation=1)  # fmt: skip
    data = pairs_of(1 if method == "orpo" else 20, 12, STEPS * PAIRS)
    with tempfile.TemporaryDirectory() as scratch:
        base, adapter = build_model(Path(scratch) / "base", **TINY), Path(scratch) / "peft"
        own = np.array(ours(settings, base, data, adapter)["steps"])
        rows = []
        for pair in range(len(data) // 2):
            chosen, rejected = data[2 * pair], data[2 * pair + 1]
            ids = chosen.ids[~chosen.trained], *(row.ids[row.trained][:-1] for row in (chosen, rejected))
            texts = (" ".join(map(str, each.tolist())) for each in ids)
            rows.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)))
            rows[-1]["prompt"] += " "
        job = {"base": str(base), "adapter": str(adapter), "out": str(Path(scratch) / "out"), "method": method,
               "beta": settings.beta, "rate": settings.learning_rate, "steps": STEPS, "pairs": PAIRS, "rows": rows,
               "vocabulary": VOCABULARY, "end": END}  # fmt: skip
        (Path(scratch) / "job.json").write_text(json.dumps(job))
        run = subprocess.run([python, str(PEER), str(Path(scratch) / "job.json")], check=True, stdout=subprocess.PIPE)
    theirs = np.array(json.loads(run.stdout.splitlines()[-1]))
    apart = np.abs(own - theirs) / np.abs(theirs)
    return [method, STEPS, *(f"{own[place][0]:.6f} / {theirs[place][0]:.6f}" for place in (0, -1)),
            f"{apart[:, 0].max():.1e}", f"{apart[:, 1].max():.1e}"]  # fmt: skip


def main(python: str) -> None:
    """Compare with TRL, then measure both ways to compute a pair on the shape of Qwen2.5-0.5B."""
    load_fast_blas()
    table = [beside_trl(python, method) for method in ("dpo", "orpo")]
    notes = ["Losses: ours / TRL's. Differences are relative, the largest of all steps."]
    with tempfile.TemporaryDirectory() as scratch:
        base = write_quantized_model(Path(scratch) / "base", **SHAPES["0.5b"])
        for name, batch in (("both rows in one graph", 2), ("divided, one row at a time", 1)):
            settings = dataclasses.replace(SETTINGS, method="dpo", dequantize_base=False, batch_size=batch)
            one = ours(settings, base, pairs_of(200, 60, 4), Path(scratch) / "peft", 2)
            notes.append(f"Qwen2.5-0.5B's shape, 4 pairs, 2 steps, {name}: {one['seconds']:.1f} s, peak of mlx "
                         f"{one['mib']:,.0f} MiB; the reference pass {one['reference']:.1f} s.")  # fmt: skip
    header = ["method", "steps", "first loss", "last loss", "loss apart", "gradient norm apart"]
    write_result("bench_preferences", "DPO and ORPO beside TRL", header, table, notes)


if __name__ == "__main__":
    main(sys.argv[1])

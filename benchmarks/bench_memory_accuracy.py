"""Calibrates the memory estimate on shortened models, then predicts configurations that were not in the calibration.

    python -m benchmarks.bench_memory_accuracy [--quick]

Eight architectures with random weights; each is measured at its full depth with batch sizes 1 to 8, rows of 64 to 1024
tokens, ranks 4 to 64, all or part of the blocks trained, recomputed or not, the base packed, unpacked or never
quantized, logits in chunks, accumulating or not. What is compared is the peak of mlx's allocator,
told to keep to the prediction, as a training is (engine/limits.py), and again without that. The closed form stands
beside it.
"""

import dataclasses
import itertools
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import write_result
from benchmarks.random_models import EMBEDDED
from safetrain.core.memory_terms import Coefficients
from safetrain.core.model_files import ModelFiles, read_model_plan
from safetrain.core.probes import Measured, ProbePoint, ProbeRequest
from safetrain.core.settings import LoraSettings
from safetrain.plan.calibration import Mode, fit, limit_bytes, predict, probe_points
from safetrain.plan.measure import run_probes, template

MODULE = "safetrain.engine.calibrate"
LORA = LoraSettings(8, 2.0, 0.0, 1, ("all-linear",))
LENGTHS, BATCHES, RANKS = (64, 96, 128, 200, 256, 384, 512, 768, 1024), (1, 2, 3, 4, 6, 8), (4, 8, 16, 32, 64)
MOST_TOKENS = 1024
PER_MODE = 2
LONG = {"max_position_embeddings": 4096}
PACKED = {"group_size": 64, "bits": 4}
GEMMA = {"sliding_window": 64, "sliding_window_pattern": 2, "rope_local_base_freq": 1e4,
         "rope_global_base_freq": 1e4, "query_pre_attn_scalar": 32}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama, 12 x 256, vocabulary 8k": {
        "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 32, "vocab_size": 8192, "num_hidden_layers": 12},
    "qwen2, 16 x 192, vocabulary 50k": {
        "model_type": "qwen2", "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 50_000, "num_hidden_layers": 16},
    "phi3, 10 x 384, vocabulary 4k": {
        "model_type": "phi3", "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6,
        "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 4096, "num_hidden_layers": 10,
        "tie_word_embeddings": False},
    "qwen3, 14 x 128, vocabulary 150k": {
        "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 150_000, "num_hidden_layers": 14},
    "olmo2, 9 x 320, vocabulary 1k": {
        "model_type": "olmo2", "hidden_size": 320, "intermediate_size": 832, "num_attention_heads": 5,
        "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 1024, "num_hidden_layers": 9},
    "gemma3, 12 x 256, vocabulary 16k": {
        "model_type": "gemma3_text", "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 16_000, "num_hidden_layers": 12, **GEMMA},
    "gemma2, 10 x 256, vocabulary 12k": {
        "model_type": "gemma2", "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 12_000, "num_hidden_layers": 10,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 64},
    "mistral, 10 x 512, vocabulary 32k, not quantized": {
        "model_type": "mistral", "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32_000, "num_hidden_layers": 10,
        "quantization": None},
}  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """One configuration: what was predicted and what it took, in bytes."""

    model: str
    point: ProbePoint
    predicted: int
    closed_form: int
    measured: int  # told to keep to the prediction
    unlimited: int  # told nothing
    seconds_lost: float  # by the limit, as a share of an update
    margin: float

    @property
    def error(self) -> float:
        """Signed, as a share of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def unsafe(self) -> bool:
        """Whether it took more than predicted with margin: predicted to fit a budget that it does not fit."""
        return self.measured > self.predicted * (1 + self.margin)


def main() -> None:
    """Measure, predict, and write the table; exit 1 where a promise of the plan is not kept."""
    names = list(MODELS)[:1] if "--quick" in sys.argv else list(MODELS)
    found = [each for name in names for each in compare(name)]
    rows = [row_of(name, [each for each in found if each.model == name]) for name in names]
    header = ["model", "configurations", "mean error", "95th percentile", "worst", "over the margin",
              "told nothing: mean", "95th percentile", "worst", "closed form, mean"]  # fmt: skip
    lost = 100 * float(np.median([each.seconds_lost for each in found]))
    notes = [f"Told to keep to the prediction, an update takes {lost:+.1f} % longer (median)."]
    rows.append(row_of("**all**", found))
    write_result("bench_memory_accuracy", "Predicted and measured peak memory", header, rows, notes)
    print("\n".join(f"{c.model}: {describe(c)}" for c in sorted(found, key=lambda c: -abs(c.error))[:8]))
    sys.exit(1 if any(each.unsafe for each in found) else 0)


def compare(name: str) -> list[Compared]:
    """Calibrate on one architecture in each mode, then predict others of its configurations."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = {**json.loads((EMBEDDED / "config.json").read_text()), **LONG, "quantization": PACKED, **MODELS[name]}
        (folder / "config.json").write_text(json.dumps(config))
        model = read_model_plan(folder)
        found: list[Compared] = []
        for checkpointing, dequantize in itertools.product((False, True), (True, False)):
            if dequantize and model.quantization_bits is None:
                continue
            mode = Mode(checkpointing, dequantize)
            probes = measure(folder, probe_points(model, template("lora", LORA), mode), floors=True)
            calibration = fit(model, mode, probes)
            closed = dataclasses.replace(calibration, coefficients=Coefficients(), extra_bytes=0, ahead=0.0)
            points = held_out(model, mode, f"{name}{mode}")
            told = tuple(
                dataclasses.replace(point, mlx_limit_bytes=limit_bytes(model, calibration, point)) for point in points
            )
            for each, free in zip(measure(folder, told), measure(folder, points), strict=True):
                predicted, plain = (predict(model, how, each.point) for how in (calibration, closed))
                slower = each.step_seconds / free.step_seconds - 1
                found.append(
                    Compared(
                        name, each.point, predicted, plain, each.peak_bytes, free.peak_bytes, slower, calibration.margin
                    )
                )
                print(f"{name}: {describe(found[-1])}", flush=True)
    return found


def held_out(model: ModelFiles, mode: Mode, seed: str) -> tuple[ProbePoint, ...]:
    """Configurations of the whole depth, drawn from a seed."""
    source, found = random.Random(seed), []
    for _ in range(PER_MODE):
        tokens = source.choice(LENGTHS)
        rows = min(source.choice(BATCHES), max(1, MOST_TOKENS // tokens))
        blocks = source.choice((model.num_layers, model.num_layers, model.num_layers // 2, 2))
        lora = dataclasses.replace(LORA, rank=source.choice(RANKS), num_layers=blocks)
        settings = dataclasses.replace(
            template("lora", lora),
            batch_size=rows,
            gradient_accumulation=source.choice((1, 1, 2)),
            gradient_checkpointing=mode.checkpointing,
            dequantize_base=mode.dequantize_base,
        )
        found.append(ProbePoint(model.num_layers, tokens, settings))
    return tuple(found)


def measure(folder: Path, points: tuple[ProbePoint, ...], *, floors: bool = False) -> list[Measured]:
    """All points, in a process of their own; raises RuntimeError when it does not get through."""
    measured, ended = run_probes(MODULE, ProbeRequest(str(folder), False, points, floors=floors), 1800)
    if ended:
        raise RuntimeError(ended)
    return measured


def summary(errors: list[float]) -> list[str]:
    """Mean, 95th percentile and largest of the absolute errors."""
    sizes = 100 * np.abs(errors)
    return [f"{sizes.mean():.1f} %", f"{np.percentile(sizes, 95):.1f} %", f"{sizes.max():.1f} %"]


def row_of(name: str, found: list[Compared]) -> list[object]:
    """A line of the table."""
    told, free = [each.error for each in found], [each.predicted / each.unlimited - 1 for each in found]
    closed = summary([each.closed_form / each.unlimited - 1 for each in found])[0]
    return [name, len(found), *summary(told), sum(each.unsafe for each in found), *summary(free), closed]


def describe(compared: Compared) -> str:
    """One configuration on one line."""
    s = compared.point.settings
    how = ("recomputed" if s.gradient_checkpointing else "kept") + (", unpacked" if s.dequantize_base else ", packed")
    shape = f"{s.batch_size} x {compared.point.tokens} tokens, rank {s.lora.rank} on {s.lora.num_layers} blocks"
    measured = f"measured {compared.measured / 2**20:.1f} MiB, told nothing {compared.unlimited / 2**20:.1f}"
    sizes = f"predicted {compared.predicted / 2**20:.1f}, {measured}"
    return f"{shape}, {how}: {sizes}, {100 * compared.error:+.1f} %"


if __name__ == "__main__":
    main()

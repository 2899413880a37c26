"""Values that are not searched for, with reasons: by data and model; the computing type by the machine."""

import math

from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine
from safetrain.core.records.schema import PRETRAIN, WHOLE, Train
from safetrain.core.records.settings import LoraSettings, updates_per_epoch, usual_warmup

ROWS_PER_UPDATE = 16
MIN_UPDATES, MAX_EPOCHS = 300, 8
FULL_RATE_FACTOR = 10
LEAST_PRETRAIN_UPDATES, LEAST_UPDATE_TOKENS, HIGHEST_PRETRAIN_RATE = 500, 2048, 4e-3


def epochs_for(rows: int, rows_per_update: int, train: Train, reasons: dict[str, str]) -> int:
    """Three passes; more for little data, up to eight, so that there are 300 updates; one above 50,000 rows."""
    if train.num_epochs is not None:
        reasons["num_epochs"] = "set by you"
        return train.num_epochs
    per_epoch = updates_per_epoch(rows, rows_per_update)
    usual = 1 if rows > 50_000 else 3
    epochs = max(usual, min(MAX_EPOCHS, math.ceil(MIN_UPDATES / per_epoch)))
    ended = f", ended by max_steps = {train.max_steps}" if train.max_steps else ""
    note = "; what validates best is kept" if epochs > usual else ""
    reasons["num_epochs"] = f"{epochs} passes of {per_epoch} updates over {rows} rows{ended}{note}"
    return epochs


def intervals(updates: int, reasons: dict[str, str], method: str) -> dict[str, int]:
    """Warm-up and intervals, in optimizer updates."""
    warmup, trained = usual_warmup(updates), "weights" if method in WHOLE else "adapter"
    log = max(1, min(10, updates // 10))
    interval = max(1, min(500, round(updates / 10 / log) * log))
    reasons["warmup_steps"] = f"5 % of {updates} updates"
    reasons["save_steps"] = "about a tenth of the run, at most 500 updates: that much is lost at worst"
    reasons["eval_steps"] = f"about a tenth of the run: each validation is a candidate for the best {trained}"
    reasons["log_steps"] = f"every {log} updates" if log > 1 else "every update: there are few"
    return {"warmup_steps": warmup, "save_steps": interval, "eval_steps": interval, "log_steps": log}


def learning_rate_for(
    model: ModelFiles, lora: LoraSettings, method: str, rows_per_update: int, reasons: dict[str, str]
) -> float:
    """scale x rate = 4e-4 to width 2560, 2e-4 to 5120, 1e-4 above; more below 2048; root of the batch relative to 16.

    First-order, Adam sees scale x rate, so the two are chosen together (QLoRA, Unsloth, tinker's sweeps bracket the
    values). Below a width of 2048 the rate grows as (2048 / width)^0.781, tinker's fit for the Llama family. It never
    depends on how much memory there is. Full fine-tuning wants a tenth (LoRA without regret, Thinking Machines 2025).
    """
    width, per_update = model.hidden_size, f"for {rows_per_update} rows per update"
    product = 4e-4 if width <= 2560 else 2e-4 if width <= 5120 else 1e-4
    product *= max(1.0, 2048 / width) ** 0.781 * min(2.0, max(0.5, math.sqrt(rows_per_update / ROWS_PER_UPDATE)))
    if method == "full":
        reasons["learning_rate"] = f"width {width}: a tenth of what LoRA wants, {per_update}"
        return float(f"{product / FULL_RATE_FACTOR:.2g}")
    rate, scale = float(f"{product / lora.scale:.2g}"), lora.scale
    together = f"scale x rate = {rate * scale:.2g}"
    reasons["learning_rate"] = f"width {width} and LoRA scale {scale:g}: {together}, {per_update}"
    return rate


def tokens_per_update(parameters: int, tokens: int) -> int:
    """Tokens of an update of pretraining: 0.292 C^0.3271, for C = 6 N D operations (arXiv 2401.02954, formula 1).

    ``parameters`` N, ``tokens`` D over the whole training; so few that there are LEAST_PRETRAIN_UPDATES, where that
    leaves LEAST_UPDATE_TOKENS: with fewer, the optimizer takes longer than the gradient.
    """
    fitted = 0.292 * (6.0 * parameters * tokens) ** 0.3271
    return int(max(LEAST_UPDATE_TOKENS, min(fitted, tokens / LEAST_PRETRAIN_UPDATES)))


def pretraining_rate(parameters: int, tokens: int, update_tokens: int, reasons: dict[str, str]) -> float:
    """0.3118 C^-0.125 (arXiv 2401.02954, formula 1), times the root of the update relative to its formula's."""
    operations = 6.0 * parameters * tokens
    usual = 0.292 * operations**0.3271
    rate = 0.3118 * operations**-0.125 * min(2.0, max(0.1, math.sqrt(update_tokens / usual)))
    rate = float(f"{min(rate, HIGHEST_PRETRAIN_RATE):.2g}")
    reasons["learning_rate"] = (
        f"{parameters / 1e6:.3g} million parameters and {tokens / 1e6:.3g} million tokens, {update_tokens} of them an "
        "update (DeepSeek's fit)"
    )
    return rate


def compute_dtype_of(train: Train, machine: Machine, model: ModelFiles) -> str | None:
    """The pin, or what suits machine and base; None: the type that the base is stored in.

    A model that is trained whole is computed in bfloat16 on a GPU, if that is not slower: its weights stay float32.
    """
    if train.method == PRETRAIN and machine.backend != "cpu":
        return train.compute_dtype or machine.compute_dtype or "bfloat16"
    return train.compute_dtype or usual_dtype(machine, model, dequantized=bool(train.dequantize_base))


def usual_dtype(machine: Machine, model: ModelFiles, *, dequantized: bool = False) -> str | None:
    """float32 for a base in bfloat16 on a machine that was found to be slower in that; no other base is cast.

    ``dequantized``: a quantized base is not multiplied as one (train.dequantize_base).
    """
    if not model.in_bfloat16:
        return None
    plain = dequantized or model.quantization_bits is None
    return machine.compute_dtype if plain else machine.quantized_compute_dtype


def why_compute_dtype(train: Train, machine: Machine, model: ModelFiles) -> str:
    """The reason, in words."""
    if train.compute_dtype is not None:
        return "set by you"
    if train.method == PRETRAIN and machine.backend != "cpu":
        return "what a pass computes in; the weights themselves are float32"
    if machine.backend == "cpu":
        return "a CPU computes everything in float32, whatever the base is stored in"
    if compute_dtype_of(train, machine, model) is not None:
        return "this GPU emulates bfloat16, in which the base is stored; layers in float32 were measured to be faster"
    return "the type that the base is stored in: nothing is known to be faster here"

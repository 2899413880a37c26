"""The recommended learning rate, and its reason."""

import math

from safetrain.core.records.schema import PAIRED
from safetrain.plan.candidates import ROWS_PER_UPDATE, Estimate, fitted_update_tokens

HIGHEST_RATE = 4e-3  # of pretraining
RATE_DIVISOR = 10  # of full fine-tuning and pairs (DPO: arXiv 2310.16944 uses 5e-7 where SFT has 2e-5; LoRA: TRL)


def learning_rate_for(fit: Estimate) -> tuple[float, str]:
    """Learning rate, and its reason: scale x rate = 4e-4 up to width 2560, 2e-4 up to 5120, 1e-4 above.

    Times sqrt(batch / 16). To first order, Adam's step depends on scale x rate, so both are chosen together (QLoRA,
    Unsloth and tinker's sweeps bracket the values). Below a width of 2048 the rate grows as (2048 / width)^0.781,
    tinker's fit for Llama. The rate never depends on memory. Full fine-tuning uses a tenth (LoRA without regret,
    Thinking Machines 2025).
    """
    width, rows, scale = fit.model.hidden_size, fit.settings.rows_per_update, fit.settings.lora.scale
    product = 4e-4 if width <= 2560 else 2e-4 if width <= 5120 else 1e-4
    product *= max(1.0, 2048 / width) ** 0.781 * min(2.0, max(0.5, math.sqrt(rows / ROWS_PER_UPDATE)))
    rate = float(f"{product / scale:.2g}")
    if fit.settings.method in PAIRED:
        why = f"width {width}: a tenth of the rate for single answers, as published for pairs"
        return float(f"{product / RATE_DIVISOR / scale:.2g}"), why
    if fit.settings.method == "full":
        why = f"width {width}: a tenth of the rate for LoRA, for {rows} rows per update"
        return float(f"{product / RATE_DIVISOR:.2g}"), why
    why = f"width {width} and LoRA scale {scale:g}: scale x rate = {rate * scale:.2g}, for {rows} rows per update"
    return rate, why


def pretraining_rate(parameters: int, tokens: int, update_tokens: int) -> tuple[float, str]:
    """Learning rate for C operations, and its reason.

    0.3118 C^-0.125 (arXiv 2401.02954, formula 1) x sqrt(batch / fitted batch).
    """
    operations = 6.0 * parameters * tokens
    rate = 0.3118 * operations**-0.125 * min(2.0, max(0.1, math.sqrt(update_tokens / fitted_update_tokens(operations))))
    sizes = f"{parameters / 1e6:.3g} million parameters and {tokens / 1e6:.3g} million tokens"
    return float(f"{min(rate, HIGHEST_RATE):.2g}"), f"{sizes}, {update_tokens:,} per step (DeepSeek's fit)"

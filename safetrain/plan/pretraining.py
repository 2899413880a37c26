"""Pretraining: windows, tokens, passes and learning rate by published fits.

For a given compute, 20 tokens per parameter train best (Hoffmann et al. 2022, arXiv:2203.15556,
table 3). Up to four passes over the same text are worth nearly as much as new text; more are worth much less
(Muennighoff et al. 2023, arXiv:2305.16264).
"""

import math

from safetrain.core.formatting import count_text
from safetrain.core.model.files import ModelFiles
from safetrain.core.model.presets import TOKENS_PER_PARAMETER, wanted_tokens
from safetrain.core.records.schema import Train
from safetrain.core.records.settings import Recommendation

MOST_PASSES = 4
FAR_BELOW = 0.5  # share of the wanted tokens
MOST_WINDOW = 2048  # tokens; usual in published pretraining runs of small models
LEAST_UPDATES, LEAST_UPDATE_TOKENS = 500, 2048
HIGHEST_RATE = 4e-3


def window_length(model: ModelFiles) -> int:
    """Tokens in a window: the model's context, at most MOST_WINDOW."""
    return min(model.max_positions or MOST_WINDOW, MOST_WINDOW)


def windows_per_update(model: ModelFiles, tokens: int, length: int) -> int:
    """Windows per step of pretraining on ``tokens`` tokens; a power of two.

    A short run uses smaller steps, so that it makes at least LEAST_UPDATES; below LEAST_UPDATE_TOKENS, the optimizer
    would take longer than the gradient.
    """
    fitted = _fitted_update_tokens(6.0 * model.parameters * tokens)
    update_tokens = int(max(LEAST_UPDATE_TOKENS, min(fitted, tokens / LEAST_UPDATES)))
    return 2 ** max(0, round(math.log2(update_tokens / length)))


def _fitted_update_tokens(operations: float) -> float:
    """Tokens per step, for the operations of the whole run (arXiv 2401.02954, formula 1)."""
    return 0.292 * operations**0.3271


def pretraining_rate(parameters: int, tokens: int, update_tokens: int) -> tuple[float, str]:
    """Learning rate for C operations, and its reason.

    0.3118 C^-0.125 (arXiv 2401.02954, formula 1) x sqrt(batch / fitted batch).
    """
    operations = 6.0 * parameters * tokens
    usual = _fitted_update_tokens(operations)
    rate = 0.3118 * operations**-0.125 * min(2.0, max(0.1, math.sqrt(update_tokens / usual)))
    sizes = f"{parameters / 1e6:.3g} million parameters and {tokens / 1e6:.3g} million tokens"
    return float(f"{min(rate, HIGHEST_RATE):.2g}"), f"{sizes}, {update_tokens:,} per step (DeepSeek's fit)"


def tokens_to_train(parameters: int, tokens_there: int, train: Train) -> int:
    """Tokens that a run reads in the pinned epochs; else the recommended tokens, but at most four epochs."""
    if train.num_epochs is not None:
        return train.num_epochs * tokens_there
    return min(wanted_tokens(parameters), MOST_PASSES * tokens_there)


def passes_for(parameters: int, tokens_there: int) -> tuple[int, str]:
    """Epochs to reach the recommended tokens, at most four; and the reason."""
    target = wanted_tokens(parameters)
    needed = math.ceil(target / max(1, tokens_there))
    count = max(1, min(MOST_PASSES, needed))
    per = f"{TOKENS_PER_PARAMETER} tokens per parameter (Hoffmann et al. 2022)"
    text = f"{per} would be {count_text(target)}; your data has {count_text(tokens_there)}"
    if needed > count:
        text += f": {needed:,} passes; more than {MOST_PASSES} are worth much less (Muennighoff et al. 2023)"
    return count, text


def tokens_read(plan: Recommendation, tokens_there: int) -> int:
    """Tokens that a recommended pretraining reads from training documents of ``tokens_there`` tokens."""
    passes, steps = plan.settings.num_epochs * tokens_there, plan.settings.max_steps
    if steps is None:
        return passes
    return min(passes, steps * plan.settings.rows_per_update * plan.settings.max_seq_length)  # windows are full


def pretraining_text(plan: Recommendation, parameters: int, tokens_there: int) -> str:
    """Compare the tokens that a recommended pretraining reads with those that the model wants."""
    target, trained = wanted_tokens(parameters), tokens_read(plan, tokens_there)
    share, passes = trained / target, trained / max(1, tokens_there)
    text = (
        f"{count_text(parameters)} parameters want {count_text(target)} tokens "
        f"({TOKENS_PER_PARAMETER} each); your data has {count_text(tokens_there)}, so {passes:.2g} "
        f"{'pass gives' if passes == 1 else 'passes give'} {100 * share:.3g} % of the tokens wanted"
    )
    if passes > MOST_PASSES:
        return f"{text}\nmore than {MOST_PASSES} passes are worth much less (Muennighoff et al. 2023): find more text"
    if share < FAR_BELOW:
        return f"{text}\nthis is far too little text for a model of this size: find more text, or train a smaller model"
    return text

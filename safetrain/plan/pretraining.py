"""What training from scratch takes: tokens, passes over them, time. Plain numbers in, a plan out.

A model is trained best for a given compute with 20 tokens for each parameter (Hoffmann et al. 2022, arXiv:2203.15556,
table 3). Up to four passes over the same text are worth nearly as much as new text; more are worth much less
(Muennighoff et al. 2023, arXiv:2305.16264).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from safetrain.core.formatting import duration_text, size_text
from safetrain.core.records.schema import Train
from safetrain.core.records.settings import Recommendation

TOKENS_PER_PARAMETER = 20
MOST_PASSES = 4
FAR_BELOW = 0.5  # of the tokens that are wanted
DAY_SECONDS = 86_400
FURTHEST = timedelta(days=365_000)


@dataclass(frozen=True)
class PretrainingPlan:
    """What a training from scratch takes, as far as it is known."""

    parameters: int
    wanted_tokens: int
    tokens_there: int
    tokens_trained: float
    seconds: float | None  # None: not known
    measured: bool  # by a dry run; else by operations
    disk_bytes: int  # of checkpoints and token stores


def wanted_tokens(parameters: int, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> int:
    """Training tokens for a model of ``parameters`` parameters."""
    return math.ceil(parameters * tokens_per_parameter)


def tokens_to_train(parameters: int, tokens_there: int, train: Train) -> int:
    """Tokens that a run goes through: of its pinned passes, or what the model wants, in four passes at the most."""
    if train.num_epochs is not None:
        return train.num_epochs * tokens_there
    return min(wanted_tokens(parameters), MOST_PASSES * tokens_there)


def passes_for(parameters: int, tokens_there: int) -> tuple[int, str]:
    """Whole passes in which the model sees what it wants, four at the most; and why."""
    target = wanted_tokens(parameters)
    needed = math.ceil(target / max(1, tokens_there))
    count = max(1, min(MOST_PASSES, needed))
    per = f"{TOKENS_PER_PARAMETER} tokens a parameter (Hoffmann et al. 2022)"
    text = f"{per} are {count_text(target)}; there are {count_text(tokens_there)}"
    if needed > count:
        text += f": {needed:,} passes; more than {MOST_PASSES} are worth much less (Muennighoff et al. 2023)"
    return count, text


def pretraining_of(
    recommendation: Recommendation, parameters: int, tokens_there: int, flops_per_token: float,
    tflops: float | None, store_bytes: int = 0,
) -> PretrainingPlan:  # fmt: skip
    """The plan of a run as it was recommended, on the tokens of its training documents.

    Its time is by operations where no dry run has measured it and the machine's 10^12 a second are known.
    """
    trained = recommendation.num_epochs * tokens_there
    if recommendation.max_steps is not None:  # windows are full
        rows = recommendation.batch_size * recommendation.gradient_accumulation
        trained = min(trained, recommendation.max_steps * rows * recommendation.max_seq_length)
    seconds, target = recommendation.total_seconds, wanted_tokens(parameters)
    if seconds is None and tflops:
        seconds = trained * flops_per_token / (tflops * 1e12)
    measured, disk_bytes = recommendation.total_seconds is not None, recommendation.disk_bytes + store_bytes
    return PretrainingPlan(parameters, target, tokens_there, trained, seconds, measured, disk_bytes)


def pretraining_lines(plan: PretrainingPlan, now: datetime) -> Iterator[str]:
    """The plan in words; ``now`` is when the run would begin."""
    share, passes = plan.tokens_trained / plan.wanted_tokens, plan.tokens_trained / max(1, plan.tokens_there)
    yield (
        f"{count_text(plan.parameters)} parameters want {count_text(plan.wanted_tokens)} tokens "
        f"({TOKENS_PER_PARAMETER} each); there are {count_text(plan.tokens_there)}: {passes:.2g} "
        f"{'pass' if passes == 1 else 'passes'}, {100 * share:.3g} % of what is wanted"
    )
    if passes > MOST_PASSES:
        yield f"more than {MOST_PASSES} passes are worth much less (Muennighoff et al. 2023): find more text"
    elif share < FAR_BELOW:
        yield "with so little text the model stays far below what its size can learn: find more, or train a smaller one"
    disk = f"{size_text(plan.disk_bytes)} on disk"
    if plan.seconds is None:
        yield f"how long it takes is not known: no dry run was made; {disk}"
        return
    by = "measured here" if plan.measured else "by its operations, as no dry run was made"
    speed = f"{plan.tokens_trained / max(plan.seconds, 1e-9):,.0f} tokens a second, {by}"
    finish = f"finished on {finish_text(now, plan.seconds)} if it begins now"
    yield f"{speed}: {duration_text(plan.seconds)}, {finish}; {disk}"


def finish_text(now: datetime, seconds: float) -> str:
    """The day, and the hour where it is within two days; years where no calendar helps."""
    ahead = timedelta(seconds=seconds) if seconds < FURTHEST.total_seconds() else FURTHEST
    if now.year + ahead.days / 365 > 9000 or ahead == FURTHEST:
        return f"no date: {seconds / DAY_SECONDS / 365:,.0f} years"
    end = now + ahead
    return f"{end:%Y-%m-%d %H:%M}" if ahead < timedelta(days=2) else f"{end:%Y-%m-%d}"


def count_text(number: float) -> str:
    """``1.7 billion``, ``85.0 million``, ``9,870``."""
    if number >= 1e9:
        return f"{number / 1e9:,.3g} billion" if number < 1e12 else f"{number / 1e12:,.3g} trillion"
    return f"{number / 1e6:.3g} million" if number >= 1e6 else f"{number:,.0f}"

"""What `recommend_config` prints: every value with its reason, what it takes, and what the length cuts off."""

from collections.abc import Iterator

import numpy as np

from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.formatting import duration_text, size_text
from safetrain.core.records.schema import PRETRAIN
from safetrain.core.records.settings import Recommendation


def recommendation_lines(recommendation: Recommendation, rows: TrainingRows) -> Iterator[str]:
    """All of it, line by line."""
    for reason in recommendation.reasons:
        section, _, key = reason.key.rpartition(".")
        value = getattr(recommendation.lora if section else recommendation, key)
        shown = ", ".join(value) if isinstance(value, tuple) else "null" if value is None else value
        yield f"{reason.key:<22} {shown!s:<12} {reason.text}"
    peak, measured = recommendation.predicted_peak_bytes, recommendation.measured_peak_bytes
    whole = peak + recommendation.process_memory_bytes
    yield (
        f"predicted: mlx {size_text(peak)}, the process {size_text(whole)} of "
        f"{size_text(recommendation.memory_budget_bytes)} (closed form)"
    )
    if measured is None:
        yield "not measured: no dry run was made"
    else:
        above = 100 * (peak / measured - 1)
        yield f"measured in a dry run: mlx {size_text(measured)}; the closed form says {above:+.0f} %"
    if recommendation.total_seconds is not None:
        in_all = duration_text(recommendation.total_seconds)
        yield f"about {recommendation.step_seconds:.2f} s an update, {in_all} in all"
    if recommendation.planned_method != PRETRAIN:
        yield from cut_lines(rows, recommendation.max_seq_length)


def cut_lines(rows: TrainingRows, length: int) -> Iterator[str]:
    """How many rows, tokens and labels the length costs; nothing where it cuts none."""
    for name, whole in (("train", rows.train.documents), ("valid", rows.valid)):
        cut = whole.cut(length)
        if not cut.cut_rows:
            continue
        tokens, left = (int(each.lengths.sum(dtype=np.int64)) for each in (whole, cut))
        labels = int(whole.label_counts.sum(dtype=np.int64))
        yield (
            f"{name}: {length} tokens cut {cut.cut_rows} of {len(whole)} rows, {100 * (1 - left / tokens):.2f} % of "
            f"the tokens, {100 * cut.lost_labels / max(1, labels):.2f} % of those that are trained on"
        )

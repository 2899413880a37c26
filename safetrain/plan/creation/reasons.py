"""Why a new model has the shape it has, in words."""

from dataclasses import dataclass

from safetrain.core.formatting import size_text
from safetrain.plan.creation.create import CreatedModel
from safetrain.plan.creation.shapes import GROUPED_FROM, AskedShape, ModelShape

ASKED = "as asked"
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556


@dataclass(frozen=True)
class Derived:
    """One value of a model, and why."""

    name: str
    value: str
    reason: str


def reasons_of(made: CreatedModel, asked: AskedShape) -> tuple[Derived, ...]:
    """All values of a model, what was asked and what follows from it."""
    shape, rule = made.shape, made.weights
    share = f"embeddings and norms included; embeddings are {100 * shape.embedding / shape.parameters:.0f} %"
    return (
        Derived("parameters", f"{shape.parameters:,}", share),
        *_of_blocks(shape, asked),
        *_of_text(made, asked),
        Derived("context", f"{shape.context:,}", ASKED if asked.context else "tokens; --context for more"),
        Derived("rope_theta", f"{shape.rope_theta:,.0f}", "for this context (Su et al. 2021; Men et al. 2024)"),
        Derived("initial weights", f"std {rule.deviation:.4f}", "sqrt(2 / (5 x width)) (Nguyen and Salazar 2019)"),
        Derived("o_proj, down_proj", f"std {rule.residual_deviation:.4f}", "that / sqrt(2 x layers) (GPT-2)"),
        Derived("stored as", rule.dtype, f"seed {rule.seed}"),
    )


def _of_blocks(shape: ModelShape, asked: AskedShape) -> tuple[Derived, ...]:
    own = asked.hidden and asked.layers
    return (
        Derived(
            "layers x width",
            f"{shape.layers} x {shape.hidden}",
            ASKED if own else "near ln(width) = 5.04 + 0.0555 layers (Levine et al. 2020)",
        ),
        Derived("heads", f"{shape.heads} of {shape.head}", ASKED if asked.heads else "64 features each, 32 if narrow"),
        Derived(
            "keys and values",
            f"{shape.key_heads} of {shape.head}",
            _why_keys(shape),
        ),
        Derived("feed-forward", f"{shape.feed_forward:,}", "8/3 of the width (Shazeer 2020), in groups of 64"),
        Derived(
            "head",
            "tied" if shape.tied else "its own",
            "the embedding again (Press and Wolf 2017)" if shape.tied else "from a billion parameters on",
        ),
    )


def _why_keys(shape: ModelShape) -> str:
    group = shape.heads // shape.key_heads
    if group > 1:
        return f"{group} heads share one (Ainslie et al. 2023)"
    if shape.hidden < GROUPED_FROM:
        return f"one a head: below a width of {GROUPED_FROM} sharing would save little"
    return "one a head: neither 3, 4 nor 2 could share one"


def _of_text(made: CreatedModel, asked: AskedShape) -> tuple[Derived, ...]:
    if made.trained is None or made.sample is None:
        return (Derived("vocabulary", f"{made.shape.vocabulary:,}", "of the model whose tokenizer was taken"),)
    size, total = size_text(made.sample.sample_bytes), size_text(made.sample.total_bytes)
    tokens = made.sample.total_bytes / made.trained.bytes_per_token
    by_rule = "by model (Tao et al. 2024) and text (Gowda and May 2020)"
    return (
        Derived("vocabulary", f"{made.shape.vocabulary:,}", ASKED if asked.vocabulary else by_rule),
        Derived(
            "tokenizer",
            f"{made.trained.bytes_per_token:.2f} bytes per token",
            f"trained on {size}" if made.sample.is_all else f"trained on a sample, {size} of {total}",
        ),
        Derived(
            "text for it",
            f"{_rounded(TOKENS_PER_PARAMETER * made.shape.parameters)} tokens",
            f"20 a parameter (Hoffmann et al. 2022); this text has {_rounded(tokens)}",
        ),
    )


def _rounded(number: float) -> str:
    """As ``1.7 billion``."""
    for size, word in ((1e9, " billion"), (1e6, " million"), (1e3, " thousand")):
        if number >= size:
            return f"{number / size:.3g}{word}"
    return f"{number:.0f}"

"""Why a new model has the shape it has, in words."""

from dataclasses import dataclass

from safetrain.core.formatting import size_text
from safetrain.plan.creation.create import CreatedModel
from safetrain.plan.creation.shapes import UNTIED_FROM, AskedShape


@dataclass(frozen=True)
class Derived:
    """One value of a model, and why."""

    name: str
    value: str
    reason: str


def reasons_of(made: CreatedModel, asked: AskedShape) -> tuple[Derived, ...]:
    """All values of a model, what was asked and what follows from it."""
    shape, rule = made.shape, made.weights
    own = "as asked"
    group = shape.heads // shape.key_heads
    share = 100 * shape.embedding / shape.parameters
    kept = "the embedding is the head too: below a billion parameters it would be counted twice (Press and Wolf 2017)"
    return (
        Derived("parameters", f"{shape.parameters:,}", f"embeddings and norms included; embeddings are {share:.0f} %"),
        Derived(
            "layers x width",
            f"{shape.layers} x {shape.hidden}",
            own
            if asked.hidden and asked.layers
            else "nearest to ln(width) = 5.04 + 0.0555 layers (Levine et al. 2020) at this size; "
            "small models gain by depth (Liu et al. 2024, MobileLLM)",
        ),
        Derived(
            "heads",
            f"{shape.heads} of {shape.head}",
            own if asked.heads else "64 features a head, 32 in narrow models, so that there are several",
        ),
        Derived(
            "keys and values",
            f"{shape.key_heads} heads",
            f"{group} heads share one: a smaller cache at nearly the same loss (Ainslie et al. 2023)"
            if group > 1
            else "one for each head: sharing would save little here",
        ),
        Derived(
            "feed-forward", f"{shape.feed_forward:,}", "8/3 of the width (SwiGLU: Shazeer 2020), whole groups of 64"
        ),
        Derived("vocabulary", f"{shape.vocabulary:,}", _vocabulary(made, asked)),
        Derived("head", "tied" if shape.tied else "its own", kept if shape.parameters < UNTIED_FROM else "large model"),
        Derived(
            "context", f"{shape.context:,} tokens", own if asked.context else "--context for more; rows may be shorter"
        ),
        Derived("rope_theta", f"{shape.rope_theta:,.0f}", "enough for the context (Su et al. 2021; Men et al. 2024)"),
        Derived(
            "initial weights",
            f"std {rule.deviation:.4f}",
            f"sqrt(2 / (5 x width)) (Nguyen and Salazar 2019); o_proj and down_proj / sqrt(2 x layers): "
            f"{rule.residual_deviation:.4f} (GPT-2); norms 1; seed {rule.seed}, {rule.dtype}",
        ),
    )


def _vocabulary(made: CreatedModel, asked: AskedShape) -> str:
    if made.trained is None or made.sample is None:
        return "that of the model whose tokenizer was taken"
    read, all_of_it = size_text(made.sample.sample_bytes), size_text(made.sample.total_bytes)
    text = all_of_it if made.sample.is_all else f"a sample of {read} of {all_of_it}"
    why = (
        "as asked" if asked.vocabulary else "by the model's size (Tao et al. 2024) and the text's (Gowda and May 2020)"
    )
    return f"{why}; trained on {text}: {made.trained.bytes_per_token:.2f} bytes per token"

"""What an adapter's folder does once it is opened again, beside the model in the training's memory. Pure."""

from dataclasses import dataclass

from safetrain.core.errors import TrainingError

NO_CHANGE = 1e-6  # nats per label: the rounding of a divergence computed in float32
ROUNDING_16_BIT = 5e-3  # the same of two ways to compute one model in 16-bit numbers
OF_LOSS = 10  # times as much: rounding moves a loss by its own size, a divergence by the square
DISCARD = "throw this training away with 'safetrain discard', and train with a higher train.learning_rate"


@dataclass(frozen=True)
class ComparedWith:
    """A model beside the tuned one. An answer is a whole row: all its labels, read greedily."""

    loss: float  # nats per label
    divergence: float  # KL(tuned || this model), nats per label
    same_answers: int  # rows in which both choose the same token at every label


@dataclass(frozen=True)
class Proof:
    """ "proof" in training_summary.json: base, and base with the opened folder, on some rows of the validation."""

    rows: int
    labels: int
    tuned_loss: float  # loss of the model in memory at its best step
    base: ComparedWith
    opened: ComparedWith
    opened_by: str  # mlx-lm; safetrain for DoRA on a base of 3, 5 or 6 bits


def require_proof(proof: Proof, adapter: str, *, in_16_bit: bool) -> None:
    """Raise TrainingError where the adapter changes nothing, or where the opened folder is not the tuned model.

    In 16 bits two ways to compute one model differ by a rounding that depends on the model: only a folder that is as
    near to the base as to the tuned model is refused.
    """
    base, reopened, rounding = proof.base, proof.opened, ROUNDING_16_BIT if in_16_bit else NO_CHANGE
    share = 0.5 if in_16_bit else 0.02
    gained = abs(base.loss - proof.tuned_loss)
    if base.divergence < NO_CHANGE and gained < NO_CHANGE:
        raise TrainingError(
            "The adapter changes nothing: the tuned model is its base on every label that was compared.",
            where=adapter,
            got=f"a divergence of {base.divergence:.1e} nats per label",
            do=DISCARD,
        )
    near, near_loss = max(rounding, share * base.divergence), max(OF_LOSS * rounding, share * gained)
    if not (reopened.divergence <= near and abs(reopened.loss - proof.tuned_loss) <= near_loss):
        raise TrainingError(
            "The adapter's folder is not the model that was trained: mlx-lm opens it as another one.",
            where=adapter,
            expected=f"at most {near:.1e} nats per label from the tuned model, and its loss, {proof.tuned_loss:.4f}",
            got=f"{reopened.divergence:.1e}, and a loss of {reopened.loss:.4f}; the base: {base.divergence:.1e}, "
            f"{base.loss:.4f}",
            do="do not touch the folder while training runs and run the same command again; if it says the same, "
            "report this model's architecture",
        )


def describe_proof(proof: Proof) -> str:
    """One line for a terminal."""
    return (
        f"the saved adapter, opened by {proof.opened_by}, answers the same on {proof.opened.same_answers} of "
        f"{proof.rows} rows (base: {proof.base.same_answers}), {proof.opened.divergence:.2g} nats per label apart "
        f"(base: {proof.base.divergence:.2g})"
    )

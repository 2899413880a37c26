"""The losses of preference training, and what they say about pairs of answers. Pure functions."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.records.schema import DPO

LEAST_DOUBT = -1e-6  # log of the highest probability of a token: at 1 the odds are infinite
TIE = 1e-5  # nats: a smaller margin is rounding, as before the first step of DPO


@dataclass(frozen=True)
class PairScores:
    """What a model prefers, for each pair: arrays of shape (pairs,), in nats."""

    losses: np.ndarray
    margins: np.ndarray  # reward of the chosen answer minus that of the rejected one
    chosen: np.ndarray  # log-probability of the chosen answer
    rejected: np.ndarray

    @property
    def sums(self) -> list[float]:
        """Sums over the pairs: loss, right pairs, margin, and the log-probabilities of chosen and rejected answers."""
        right = self.margins > TIE
        return [float(each.sum()) for each in (self.losses, right, self.margins, self.chosen, self.rejected)]


@dataclass(frozen=True)
class PairLoss:
    """DPO (arXiv 2305.18290, equation 7) or ORPO (arXiv 2403.07691, equations 5 to 7) on pairs, chosen row first.

    Arrays have shape (rows,), two rows a pair: the log-probability of each answer (``sums``), its number of tokens, and
    its log-probability under the reference model. Results have shape (pairs,). ``xp``: numpy, or mlx.core.
    """

    method: str
    beta: float
    xp: Any = np

    def __call__(self, sums: Any, lengths: Any, references: Any) -> Any:
        """The loss of each pair, in nats."""
        xp = self.xp
        if self.method == DPO:
            return xp.logaddexp(xp.zeros(()), -self.margins(sums, lengths, references))
        means = sums / lengths
        odds = means - xp.log1p(-xp.exp(xp.minimum(means, LEAST_DOUBT)))  # log(p / (1 - p))
        return -means[::2] + self.beta * xp.logaddexp(xp.zeros(()), odds[1::2] - odds[::2])

    def margins(self, sums: Any, lengths: Any, references: Any) -> Any:
        """Reward of the chosen answer minus that of the rejected one; above 0 the model prefers the chosen one."""
        rewards = self.beta * (sums - references if self.method == DPO else sums / lengths)
        return rewards[::2] - rewards[1::2]

    def scores(self, sums: np.ndarray, rows: TokenRows, references: np.ndarray | None = None) -> PairScores:
        """Score the pairs in ``rows``; ``references``: None for those of the rows."""
        given = rows.reference(np.arange(len(rows))) if references is None else references
        theirs = sums, np.maximum(1, rows.label_counts), given
        return PairScores(self(*theirs), self.margins(*theirs), sums[::2], sums[1::2])

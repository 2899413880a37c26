"""Fits the coefficients of the memory estimate, and the time of a micro-batch, to what probes have measured.

The estimate is a sum of what is known and the largest of a few phases, each linear in the coefficients. So: guess which
phase is the peak of each probe, solve, and guess anew. A ridge towards the usual values holds what probes cannot tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from safetrain.core.probes import Measured

RIDGE = 0.07  # of the peak, for a coefficient that is off by as much as it usually is
LEAST_SCALE = 0.3
ROUNDS = 30

Vector = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Equation:
    """One probe, as shares of its peak."""

    phases: Vector  # (phases, coefficients): the peak is the largest of these times the coefficients ...
    known: float  # ... and this
    optimizer: float  # or the optimizer at work, and this


@dataclass(frozen=True)
class Speed:
    """Seconds of a micro-batch: a + b n T + c T + d n T S, with n trained blocks, T tokens in all, S in a row."""

    fixed: float
    per_block_token: float
    per_token: float
    per_score: float

    def seconds(self, blocks: int, rows: int, tokens: int) -> float:
        """Of one micro-batch of so many rows, each of so many tokens."""
        total = rows * tokens
        linear = self.per_block_token * blocks * total + self.per_token * total
        return self.fixed + linear + self.per_score * blocks * total * tokens


def solve(equations: Sequence[Equation], usual: Vector) -> tuple[Vector, float]:
    """The coefficients, none below zero, and by how much of its peak the worst probe is missed."""
    scale = np.maximum(usual, LEAST_SCALE)
    ridge, found = np.diag((RIDGE / scale) ** 2), usual.copy()
    best, least = usual, np.inf
    for _ in range(ROUNDS):
        chosen = [each.phases[(each.phases @ found).argmax()] for each in equations if _works(each, found)]
        wanted = [1.0 - each.known for each in equations if _works(each, found)]
        rows = np.array(chosen).reshape(-1, len(usual))
        new = np.linalg.solve(rows.T @ rows + ridge, rows.T @ np.array(wanted) + ridge @ usual)
        new = np.maximum(new, 0.0)
        off = sum(missed(each, new) ** 2 for each in equations) + float((((new - usual) / scale * RIDGE) ** 2).sum())
        if off < least:
            best, least = new, off
        if np.allclose(new, found):
            break
        found = (found + new) / 2  # a step halfway, or two guesses may take turns for ever
    return best, max(missed(each, best) for each in equations)


def missed(equation: Equation, coefficients: Vector) -> float:
    """How far a probe's prediction is off, as a share of its peak."""
    working = float((equation.phases @ coefficients).max())
    return abs(equation.known + max(working, equation.optimizer) - 1.0)


def _works(equation: Equation, coefficients: Vector) -> bool:
    """Whether a phase of the coefficients is the peak, and not the optimizer."""
    return float((equation.phases @ coefficients).max()) >= equation.optimizer


def fit_speed(measured: Sequence[Measured]) -> Speed:
    """Least squares on relative errors, none below zero."""
    rows = []
    for each in measured:
        blocks, count, tokens = each.point.num_layers, each.point.settings.batch_size, each.point.tokens
        total = count * tokens
        rows.append([1.0, blocks * total, total, blocks * total * tokens])
    features, seconds = np.array(rows), np.array([each.step_seconds for each in measured])
    weighted = features / seconds[:, None]
    active = list(range(4))
    while True:
        found = np.zeros(4)
        found[active] = np.linalg.lstsq(weighted[:, active], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            return Speed(*map(float, found))
        active.remove(int(np.argmin(found)))

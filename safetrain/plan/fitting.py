"""Fits the coefficients of the memory estimate, and the time of a micro-batch, to what probes have measured.

The estimate is a sum of what is known and the largest of a few phases, each linear in the coefficients. So: guess which
phase is the peak of each probe, solve, and guess anew, from several starts; then turn one coefficient after the other.
A ridge towards the usual values holds what probes cannot tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from safetrain.core.memory_terms import Shape, parts_at_once
from safetrain.core.probes import Measured

RIDGE = 0.03  # of the peak, for a coefficient that is off by as much as it usually is
LEAST_SCALE = 0.3
ROUNDS = 30
LARGEST_TURN, SMALLEST_TURN = 0.3, 0.005
STARTS, STEPS = (1.0, 0.7, 1.4), (1.0, 0.5, 0.25, 0.1, 0.03)
SCALINGS = tuple(step / 10 for step in range(11))

Vector = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Equation:
    """One probe, as shares of its peak."""

    phases: Vector  # (phases, coefficients): the peak is the largest of these times the coefficients ...
    known: float  # ... and this
    optimizer: float  # or the optimizer at work, and this


@dataclass(frozen=True)
class Speed:
    """Seconds of a micro-batch: a + (b n T + c T + d n T S) / p^e, with n trained blocks, T tokens in all, S in a row,
    p parts that are computed side by side."""

    fixed: float
    per_block_token: float
    per_token: float
    per_score: float
    scaling: float = 0.0  # e: 1 when two parts take half the time, 0 when they take all of it

    def seconds(self, blocks: int, shape: Shape, parts: int) -> float:
        """Of one micro-batch."""
        total = shape.total
        work = self.per_block_token * blocks * total + self.per_token * total
        work += self.per_score * blocks * total * shape.tokens
        return self.fixed + work / parts**self.scaling


def solve(equations: Sequence[Equation], usual: Vector) -> tuple[Vector, float]:
    """The coefficients, none below zero, and by how much of its peak the worst probe is missed."""
    found = [_turn(equations, usual, _descend(equations, usual, share * usual)) for share in STARTS]
    best = min(found, key=lambda each: _loss(equations, usual, each))
    return best, max(missed(each, best) for each in equations)


def _descend(equations: Sequence[Equation], usual: Vector, start: Vector) -> Vector:
    """From a start, as far as the guess of the phases leads: each step solves for one guess, and goes part of the way
    where the whole of it would be worse."""
    ridge, found, least = np.diag((RIDGE / _scale(usual)) ** 2), start, np.inf
    for _ in range(ROUNDS):
        at_work = [each for each in equations if float((each.phases @ found).max()) >= each.optimizer]
        rows = np.array([each.phases[(each.phases @ found).argmax()] for each in at_work]).reshape(-1, len(usual))
        wanted = np.array([1.0 - each.known for each in at_work])
        new = np.maximum(np.linalg.solve(rows.T @ rows + ridge, rows.T @ wanted + ridge @ usual), 0.0)
        steps = [found + share * (new - found) for share in STEPS]
        best = min(steps, key=lambda each: _loss(equations, usual, each))
        loss = _loss(equations, usual, best)
        if loss >= least:
            break
        found, least = best, loss
    return found


def _turn(equations: Sequence[Equation], usual: Vector, found: Vector) -> Vector:
    """One coefficient at a time, by less and less, for as long as it helps: where phases meet, solving goes astray."""
    least, share = _loss(equations, usual, found), LARGEST_TURN
    while share > SMALLEST_TURN:
        before = least
        for place, size in enumerate(_scale(usual)):
            for turned in (share * size, -share * size):
                new = found.copy()
                new[place] = max(0.0, new[place] + turned)
                if (loss := _loss(equations, usual, new)) < least:
                    found, least = new, loss
        if least == before:
            share /= 2
    return found


def _loss(equations: Sequence[Equation], usual: Vector, coefficients: Vector) -> float:
    """Squares of what is missed, and of how far from the usual values it is."""
    ridge = ((coefficients - usual) / _scale(usual) * RIDGE) ** 2
    return sum(missed(each, coefficients) ** 2 for each in equations) + float(ridge.sum())


def _scale(usual: Vector) -> Vector:
    return np.maximum(usual, LEAST_SCALE)


def missed(equation: Equation, coefficients: Vector) -> float:
    """How far a probe's prediction is off, as a share of its peak."""
    working = float((equation.phases @ coefficients).max())
    return abs(equation.known + max(working, equation.optimizer) - 1.0)


def fit_speed(measured: Sequence[Measured]) -> Speed:
    """Least squares on relative errors, none of the factors below zero, for the best of a few ways of scaling."""
    found = [_fit_speed(measured, scaling) for scaling in SCALINGS]
    return min(found, key=lambda each: each[1])[0]


def _fit_speed(measured: Sequence[Measured], scaling: float) -> tuple[Speed, float]:
    """The speed, and the sum of the squared relative errors."""
    rows = []
    for each in measured:
        blocks, count, tokens = each.point.num_layers, each.point.settings.batch_size, each.point.tokens
        total = count * tokens / parts_at_once(count, on_cpu=each.device == "cpu") ** scaling
        rows.append([1.0, blocks * total, total, blocks * total * tokens])
    weighted = np.array(rows) / np.array([each.step_seconds for each in measured])[:, None]
    active = list(range(4))
    while True:
        found = np.zeros(4)
        found[active] = np.linalg.lstsq(weighted[:, active], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0).all():
            fixed, per_block_token, per_token, per_score = map(float, found)
            off = float(((weighted @ found - 1.0) ** 2).sum())
            return Speed(fixed, per_block_token, per_token, per_score, scaling), off
        active.remove(int(np.argmin(found)))

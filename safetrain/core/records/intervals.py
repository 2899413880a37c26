"""How sure a measured number is: 95 % intervals of shares and of differences between two models. Pure."""

import math

import numpy as np

from safetrain.core.records.reports import Improvement

Z95 = 1.959964  # two-sided 95 % of a normal distribution


def improvement(base: np.ndarray, tuned: np.ndarray, labels: np.ndarray) -> Improvement:
    """Of each row the summed loss of both models and its labels, (rows,).

    The difference of the mean losses per label; its interval by leaving out each row once (jackknife): labels of one
    row are not independent.
    """
    gained, rows, total = base - tuned, len(labels), labels.sum(dtype=np.int64)
    mean = float(gained.sum() / total)
    if rows < 2:
        return Improvement(mean, None, rows)
    without = (gained.sum() - gained) / (total - labels)
    error = math.sqrt((rows - 1) / rows * float(((without - without.mean()) ** 2).sum()))
    return Improvement(mean, t95(rows - 1) * error, rows)


def t95(freedom: int) -> float:
    """Two-sided 95 % of Student's distribution; beyond 2 degrees of freedom by its expansion at the normal one."""
    if freedom <= 2:
        return (12.7062, 4.30265)[freedom - 1]
    z, v = Z95, freedom
    terms = ((z**3 + z) / (4 * v), (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2),
             (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3))  # fmt: skip
    return z + sum(terms)


def wilson_interval(right: float, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22:209).

    Of the mean of numbers from 0 to 1, ``right`` their sum, it is rather too wide: they scatter less than a share does.
    """
    share, square = right / total, Z95**2 / total
    middle = (share + square / 2) / (1 + square)
    half = Z95 / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return max(0.0, middle - half), 1.0 if right == total else middle + half

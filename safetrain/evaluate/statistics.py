"""95 % intervals of losses, scores and calibration errors; statistics of the probabilities of options."""

import math
from collections.abc import Sequence

import numpy as np

from safetrain.core.records.evaluation import SURE, Z95, Calibration, Choices, Improvement, ScoreGain

BINS, DRAWS = 8, 400  # of a calibration error: bins of equal size, simulated draws
LEAST_CALIBRATED = 100  # questions from which on its interval holds


def improvement(base: np.ndarray, tuned: np.ndarray, labels: np.ndarray) -> Improvement:
    """Difference of two mean losses, from losses (rows,) that are summed over each row's labels.

    The interval is a jackknife over rows, because the labels of one row are not independent.
    """
    gained, labels = (base - tuned)[labels > 0], labels[labels > 0]
    rows, total = len(labels), max(1, int(labels.sum(dtype=np.int64)))
    mean = float(gained.sum() / total)
    if rows < 2:
        return Improvement(mean, None, rows)
    without = (gained.sum() - gained) / (total - labels)
    error = math.sqrt((rows - 1) / rows * float(((without - without.mean()) ** 2).sum()))
    return Improvement(mean, t95(rows - 1) * error, rows)


def t95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t; above 2 degrees of freedom by an expansion of the normal quantile."""
    if freedom <= 2:
        return (12.7062, 4.30265)[freedom - 1]
    z, v = Z95, freedom
    terms = ((z**3 + z) / (4 * v), (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2),
             (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3))  # fmt: skip
    return z + sum(terms)


def wilson_interval(right: float, total: int) -> tuple[float, float]:
    """95 % confidence interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22:209).

    Also of a mean of scores from 0 to 1 (``right``: their sum), where it is at least as wide as needed: no other scores
    of the same mean vary more than zeros and ones.
    """
    share, square = right / total, Z95**2 / total
    middle = (share + square / 2) / (1 + square)
    half = Z95 / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return max(0.0, middle - half), 1.0 if right == total else min(1.0, middle + half)


def score_gain(base: np.ndarray, tuned: np.ndarray) -> ScoreGain:
    """Mean difference of two models' scores, (questions,), each 0 to 1.

    Two pseudo-questions, one won and one lost, keep the interval from vanishing if all differences are equal
    (Bonett and Price 2012, J. Educ. Behav. Stat. 37:479, for right and wrong answers).
    """
    differences = tuned - base
    padded = np.append(differences, [1.0, -1.0])
    half = t95(len(padded) - 1) * float(padded.std(ddof=1)) / math.sqrt(len(padded))
    middle, mean = float(padded.mean()), float(differences.mean())
    return ScoreGain(mean, min(mean, max(-1.0, middle - half)), max(mean, min(1.0, middle + half)))


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> tuple[float, float, float] | None:
    """Calibration error, the mean of |P(right | confidence) - confidence|, with its interval; None with few questions.

    The observed error of BINS bins of equal size is biased upwards by noise, and its plain bootstrap doubly so. So a
    parametric bootstrap test is inverted (Carpenter 1999, J. R. Stat. Soc. B 61:159): the interval has the true errors
    under which the observed one is no outlier, the point is the one under which it is the median. How a true error is
    spread over the bins is an empirical Bayes estimate: a bin's gap is shrunk towards the overall gap (Efron and Morris
    1973). Measured: tests/evaluate/test_choices.py.
    """
    rows = len(confidence)
    if rows < LEAST_CALIBRATED:
        return None
    source = np.random.default_rng(0)
    order = np.lexsort((source.random(rows), confidence))  # equal ones in random order
    starts = np.arange(BINS) * rows // BINS
    sizes = np.diff(starts, append=rows)
    shares = sizes / rows
    means = np.add.reduceat(confidence[order], starts, dtype=float) / sizes
    gaps = np.add.reduceat(right[order], starts, dtype=float) / sizes - means
    truths, chances = _possible(shares, means, gaps, sizes)
    drawn = source.binomial(sizes, chances, (DRAWS, *chances.shape)) / sizes
    ends = np.quantile(np.abs(drawn - means) @ shares, [0.5, 0.975, 0.025], axis=0)
    ends = np.maximum.accumulate(ends, axis=1)
    observed = float(shares @ np.abs(gaps)) + np.array([0.0, -1e-9, 1e-9])  # an equal error is no outlier
    point, low, high = (float(np.interp(at, end, truths)) for at, end in zip(observed, ends, strict=True))
    return point, low, high


def _possible(
    shares: np.ndarray, means: np.ndarray, gaps: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Errors that may have caused the gaps, (errors,), and the chances to be right in each bin, (errors, bins)."""
    overall = shares @ gaps or -1e-9
    chance = np.clip(means + overall, 0.5 / sizes, 1 - 0.5 / sizes)
    noise = np.sqrt(chance * (1 - chance) / sizes)
    level = overall * noise / (shares @ noise)
    spread = max(0.0, shares @ ((gaps - level) ** 2 - noise**2))
    shape = level + (gaps - level) * spread / (spread + noise**2)
    lowest, highest = np.array([-2.5, 1.5]) / np.sqrt(sizes.sum()) + shares @ np.abs(gaps)
    truths = np.linspace(max(0.0, lowest), highest, 12)[:, None]
    chances = np.clip(means + truths * shape / (shares @ np.abs(shape)), 0, 1)
    return np.abs(chances - means) @ shares, chances


LEAST_FITTED = 20  # validation questions from which a temperature is fitted
TEMPERATURES = np.exp(np.linspace(-2.0, 4.0, 601))
Logprobs = Sequence[np.ndarray]  # (options,) of each question, in nats


def probabilities(logprobs: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """(options,) probabilities that add to 1, of log-probabilities in nats."""
    scaled = np.exp((logprobs - logprobs.max()) / temperature)
    return scaled / scaled.sum()


def fitted_temperature(logprobs: Logprobs, right: Sequence[int]) -> float:
    """The temperature with the least loss of the right options (Guo et al. 2017, arXiv 1706.04599, section 4.2)."""
    if len(right) < LEAST_FITTED:
        return 1.0
    losses = np.zeros(len(TEMPERATURES))
    for values, place in zip(logprobs, right, strict=True):
        scaled = (values - values.max()) / TEMPERATURES[:, None]
        losses += np.log(np.exp(scaled).sum(axis=1)) - scaled[:, place]
    return float(TEMPERATURES[losses.argmin()])


def brier_score(shares: Logprobs, right: Sequence[int]) -> float:
    """Mean squared distance of the probabilities from the right option (Brier 1950); 0 to 2."""
    return float(
        np.mean([((each - (np.arange(len(each)) == at)) ** 2).sum() for each, at in zip(shares, right, strict=True)])
    )


def macro_f1(right: Sequence[str], chosen: Sequence[str]) -> float:
    """Mean over the right options of the F1 with which each is chosen."""
    pairs, scores = list(zip(right, chosen, strict=True)), list[float]()
    for option in set(right):
        hits = sum(one == other == option for one, other in pairs)
        scores.append(2 * hits / sum((one == option) + (other == option) for one, other in pairs))
    return sum(scores) / len(scores)


def parts_of(
    logprobs: Logprobs, right: Sequence[int], texts: Sequence[Sequence[str]], options: Sequence[str]
) -> dict[str, float]:
    """Parts of a model's score that only all its answers have."""
    brier = {"brier": brier_score([*map(probabilities, logprobs)], right)}
    if not options:  # each question has its own
        return brier
    named = [own[at] for own, at in zip(texts, right, strict=True)]
    chosen = [own[int(values.argmax())] for own, values in zip(texts, logprobs, strict=True)]
    return {"macro_f1": macro_f1(named, chosen), **brier}


def choices_of_tuned(
    logprobs: Logprobs, right: Sequence[int], options: Sequence[str], texts: Sequence[Sequence[str]],
    around: tuple[str, str], fitted: tuple[Logprobs, Sequence[int]], *, are_shown: bool = False,
) -> Choices:  # fmt: skip
    """What the tuned model chose; ``fitted``: log-probabilities and right options of validation questions."""
    chosen, temperature = [int(values.argmax()) for values in logprobs], fitted_temperature(*fitted)
    shares = [probabilities(values, temperature) for values in logprobs]
    confusion = np.zeros((len(options), len(options)), dtype=int)
    for own, row, column in zip(texts, right, chosen, strict=True) if options else ():
        confusion[options.index(own[row]), options.index(own[column])] += 1
    names = {own[place] for own, place in zip(texts, chosen, strict=True)}
    return Choices(
        options=tuple(options),
        are_shown=are_shown,
        around=around,
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        majority=names.pop() if options and len(names) == 1 and len(chosen) > 1 else "",
        calibration=calibration_of(shares, right, temperature, len(fitted[1])),
    )


def calibration_of(shares: Logprobs, right: Sequence[int], temperature: float, fitted_on: int) -> Calibration:
    """How far the probabilities of the test questions' options can be believed."""
    sure = np.array([each.max() for each in shares])
    hits = np.equal([int(each.argmax()) for each in shares], right)
    above, found = sure >= SURE, calibration_error(sure, hits) or (None, None, None)
    count, good = int(above.sum()), int(hits[above].sum())
    low, high = wilson_interval(good, count) if count else (None, None)
    return Calibration(
        temperature=temperature,
        fitted_on=fitted_on if fitted_on >= LEAST_FITTED else 0,
        error=found[0],
        error_low=found[1],
        error_high=found[2],
        sure_share=count / len(sure),
        sure_right=good / count if count else None,
        sure_low=low,
        sure_high=high,
    )

"""evaluation.json and the reports of exports.

`dvc exp show` has a column per number in the order of the fields, the most important first. Texts in lists have none.
"""

from dataclasses import dataclass, field

from safetrain.core.records.schema import TEXT

REPORT, EXPORT_REPORT = "fuse_report.json", "export_report.json"  # written by fuse; by the export to PEFT
GGUF_ADAPTER = "-adapter.gguf"  # end of the name of an adapter beside its base
Z95 = 1.959964  # two-sided 95 % of a normal distribution
SURE = 0.9  # probability from which on an option is called sure


@dataclass(frozen=True)
class Improvement:
    """Difference between the losses of base and tuned model on the same rows."""

    nats_per_label: float
    plus_minus: float | None  # half of the 95 % interval; None if one row has all labels
    rows: int  # with labels


@dataclass(frozen=True, kw_only=True)
class Score:
    """A model's scores on the test file; only the loss if the file has no questions."""

    score: float | None = None  # mean of the answers' scores, each 0 to 1
    loss: float  # nats per label; preference training: per pair
    score_low: float | None = None  # 95 % interval
    score_high: float | None = None
    parts: dict[str, float] = field(default_factory=dict)  # means of the parts of the answers' scores
    mistakes: tuple[str, ...] = ()  # the commonest, each with its number of answers
    cut_answers: int = 0  # by evaluate.max_new_tokens
    endless_answers: int = 0  # whose thinking never ended; they are scored as empty
    perplexity: float | None = None  # None for a loss per pair


@dataclass(frozen=True)
class ScoreGain:
    """Score of tuned minus base on the same questions, with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Calibration:
    """How far the tuned model's probabilities of options can be believed, measured on the test questions."""

    temperature: float  # log-probabilities are divided by it: fitted on validation questions
    fitted_on: int  # validation questions; 0: too few, the temperature is 1
    error: float | None  # calibration error, with its 95 % interval; None with fewer than 100 questions
    error_low: float | None
    error_high: float | None
    sure_share: float  # questions whose likeliest option has a probability of SURE or more
    sure_right: float | None  # right ones among them, with the 95 % interval; None without any
    sure_low: float | None
    sure_high: float | None


@dataclass(frozen=True)
class Choices:
    """What the tuned model chose. ``options`` is empty if the rows have different ones."""

    options: tuple[str, ...]
    are_shown: bool  # in the prompts
    around: tuple[str, str]  # text before and after an option in an answer, such as a token that ends it
    confusion: tuple[tuple[int, ...], ...]  # numbers of answers: [right option][chosen option]
    majority: str  # the option that it always chose; empty if it chose several
    calibration: Calibration


@dataclass(frozen=True)
class Sample:
    """A question and both models' answers. Losses are means over the row's labels, in nats."""

    question: str
    expected: str
    base: str
    tuned: str
    where: str  # file:line
    base_loss: float
    tuned_loss: float
    base_score: float | None = None
    tuned_score: float | None = None
    note: str = ""  # the tuned answer's mistake, or the checker's remark


@dataclass(frozen=True)
class PartLoss:
    """Loss of tuned minus base on one part of the general text, in nats per token; None if not measured."""

    name: str  # English, Portuguese, code
    nats_per_token: float | None
    plus_minus: float | None  # half of the 95 % interval


@dataclass(frozen=True)
class Forgetting:
    """Loss of tuned minus base on parts of the general text that the base model knows; None if it knows none."""

    nats_per_token: float | None
    plus_minus: float | None  # half of the 95 % interval
    unsaid: tuple[str, ...]  # why it was not measured; empty if it was
    parts: tuple[PartLoss, ...]


@dataclass(frozen=True)
class Preference:
    """How the tuned model ranks the two answers of test pairs; rewards as in the training's loss."""

    accuracy: float  # share of pairs whose chosen answer has the higher reward
    accuracy_low: float  # 95 % interval
    accuracy_high: float
    margin: float  # mean reward of chosen minus rejected, in nats
    plus_minus: float | None  # half of the 95 % interval


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """evaluation.json: base and tuned side by side on the same rows."""

    tuned: Score
    score_gain: ScoreGain | None = None
    improvement: Improvement
    base: Score
    forgetting: Forgetting
    rows: int
    rows_available: int  # rows in the test file; ``rows`` may be an evenly spread sample
    cut_rows: int  # truncated to the length of the training
    questions: int
    answered: int  # questions that both models answered: all, or a seeded sample
    adapter: tuple[str]  # fingerprint of the measured adapter
    scorer: tuple[str, str] = (TEXT, "")  # evaluate.score as used, and why
    choices: Choices | None = None
    samples: tuple[Sample, ...]
    worst: tuple[Sample, ...]  # highest loss of the tuned model
    preference: Preference | None = None  # of pairs; then ``rows`` and losses are those of pairs


# How much of the training a fused or exported model keeps


@dataclass(frozen=True)
class Likeness:
    """A model compared with the tuned one on validation rows. An answer: the likeliest token at each label of a row."""

    loss: float  # nats per label
    divergence: float  # KL(tuned || this model), nats per label
    same_answers: float  # share of rows in which both choose the same token at every label
    right_answers: int  # rows in which this model chooses every label
    lost_answers: int  # rows that only the tuned model has right
    won_answers: int  # rows that only this model has right


@dataclass(frozen=True)
class ExportReport:
    """fuse_report.json, export_report.json or OUT.gguf.json: the written model, loaded again and compared.

    An exact export is compared number by number instead: it has no rows and no likenesses.
    """

    type: str  # of the changed weights: exact, 8 bits, float, q8_0, peft
    size_bytes: int
    base_model: str
    base_fingerprint: str
    adapter_fingerprint: str
    rows: int
    labels: int
    base: Likeness | None
    tuned: Likeness | None
    written: Likeness | None
    kept: float  # share of the improvement
    stop_ids: tuple[int, ...]  # tokens that end an answer after training

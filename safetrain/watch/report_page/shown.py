"""What a report shows, as values: the templates only write them down."""

from dataclasses import dataclass

from safetrain.watch.report_page.charts import SvgChart

GOOD, OPEN, BAD = "good", "open", "bad"  # how a fact is to be taken


@dataclass(frozen=True)
class AbsentPart:
    """A part that is not there, why, and which command makes it."""

    why: str
    command: str


@dataclass(frozen=True)
class Fact:
    """A figure with its name."""

    name: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """Cells as text. ``number_columns``: how many at the right are numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    number_columns: int = 0
    caption: str = ""


@dataclass(frozen=True)
class ShownAnswer:
    """A question, and what base and tuned model answer."""

    question: str
    expected: str
    base: str
    tuned: str
    base_right: bool
    tuned_right: bool
    losses: str
    where: str


@dataclass(frozen=True)
class Answers:
    """Sample answers; ``worst`` and ``most_changed`` are folded away."""

    samples: tuple[ShownAnswer, ...]
    worst: tuple[ShownAnswer, ...]
    most_changed: tuple[ShownAnswer, ...]
    note: str


@dataclass(frozen=True)
class CategoryRow:
    """A category's exact answers, in percent."""

    name: str
    questions: int
    base: float
    tuned: float
    low: float  # of the tuned model's 95 % interval
    high: float
    gain: str


@dataclass(frozen=True)
class MemoryBar:
    """One of the memory figures, as a share of the largest of them."""

    name: str
    value: str
    percent: float
    note: str
    is_limit: bool = False


@dataclass(frozen=True)
class MemoryShown:
    """Measured beside predicted and budget."""

    bars: tuple[MemoryBar, ...]
    terms: Table | None  # of the prediction
    note: str


@dataclass(frozen=True)
class Ended:
    """A training that ended before it was finished: the verdict."""

    heading: str
    title: str
    when: str
    facts: tuple[Fact, ...]
    evidence: tuple[str, ...]
    advice: str
    next_command: str
    is_past: bool  # the run has gone on since
    is_bad: bool  # and nobody has asked for it


@dataclass(frozen=True)
class GoneOn:
    """How the run came to where it is: continuations, and what was given up on the way."""

    lines: tuple[str, ...]
    death: Ended | None


@dataclass(frozen=True)
class FindingShown:
    """A finding in the data."""

    id: str
    severity: str
    count: str
    message: str
    where: str
    remedy: str


@dataclass(frozen=True)
class DataShown:
    """The data gate's report."""

    facts: tuple[Fact, ...]
    splits: Table
    findings: tuple[FindingShown, ...]
    left_out: int  # findings beyond those shown
    lengths: tuple[SvgChart, ...]
    cut: str


@dataclass(frozen=True)
class SettingShown:
    """A value of the configuration, and where it is from."""

    key: str
    value: str
    decided: str  # recommended, you, or a rung
    reason: str


@dataclass(frozen=True)
class Configuration:
    """All values that ran; those with a reason come first."""

    settings: tuple[SettingShown, ...]
    note: str


@dataclass(frozen=True)
class AgainCommand:
    """A command, and what it is for."""

    command: str
    purpose: str


@dataclass(frozen=True)
class Continuation:
    """What a model that is trained from scratch wrote at a step, behind the beginning of a document."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class ReportPage:
    """The whole page."""

    title: str
    subtitle: str
    state: str
    tone: str  # of the state
    verdict: str
    verdict_tone: str
    said: tuple[str, ...]
    proven_by: str  # fingerprints
    figures: tuple[Fact, ...]
    death: Ended | None  # that the run has not come back from
    answers: Answers | AbsentPart
    categories: tuple[CategoryRow, ...]
    loss: SvgChart | AbsentPart
    curves: tuple[SvgChart, ...]
    memory: MemoryShown | AbsentPart
    gone_on: GoneOn | None
    data: DataShown | AbsentPart
    configuration: Configuration | AbsentPart
    proof: str
    environment: tuple[Fact, ...] | AbsentPart
    again: tuple[AgainCommand, ...]
    unreadable: tuple[tuple[str, str], ...]
    written: tuple[Continuation, ...] = ()


@dataclass(frozen=True)
class RunDifference:
    """One thing of two runs. ``tone``: whether the second is better or worse, where that can be said."""

    name: str
    first: str
    second: str
    change: str
    tone: str = ""


@dataclass(frozen=True)
class ComparedAnswer:
    """A question that both runs have answered."""

    question: str
    expected: str
    first: str
    second: str
    first_right: bool
    second_right: bool


@dataclass(frozen=True)
class ComparePage:
    """Two runs side by side, differences first."""

    title: str
    first: str
    second: str
    verdict: str
    verdict_tone: str
    missing: tuple[AbsentPart, ...]
    metrics: tuple[RunDifference, ...]
    configuration: tuple[RunDifference, ...]
    data: tuple[RunDifference, ...]
    environment: tuple[RunDifference, ...]
    charts: tuple[SvgChart, ...]
    answers: tuple[ComparedAnswer, ...]
    answers_note: str
    same: tuple[RunDifference, ...]

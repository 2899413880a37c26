"""Every key that a user can set: its type, range and section. Values are only in params.yaml: no defaults here.

These are plain dataclasses, because Hydra merges into them; stages pass the sections on, never the whole.
"""

from dataclasses import dataclass, field
from typing import Any

LOWER_RATE, HIGHER_RATE = "a lower train.learning_rate", "a higher train.learning_rate"  # in remedies
SET = "set by you"  # in the reason for a value
PRETRAIN = "pretrain"  # train.method
WHOLE = ("full", PRETRAIN)  # methods that train the weights themselves, without an adapter
DPO = "dpo"
PAIRED = (DPO, "orpo")  # methods that train LoRA on pairs of answers
OFF = ("max_examples", "max_loss_jump", "early_stopping_patience", "from_adapter")  # of train: null is off
OF_START = ("rank", "scale", "num_layers", "targets")  # of lora: what the adapter of train.from_adapter decides
TEXT, CHOICE, JSON, TOOLS, CHECKER = "text", "choice", "json", "tools", "checker"  # evaluate.score
RENAMED = {"gate.least_exact_match": "gate.least_score"}  # keys of earlier versions
RANGE, CHOICES = "range", "choices"


def rows_together(method: str) -> int:
    """The fewest rows in a micro-batch: the loss of a pair needs both of its rows."""
    return 2 if method in PAIRED else 1


def number(**limits: float) -> Any:
    """A numeric key with its range: at_least, above and at_most."""
    return field(metadata={RANGE: limits})


def choice(*values: str | int) -> Any:
    """A key with a few allowed values."""
    return field(metadata={CHOICES: values})


@dataclass(kw_only=True)
class Model:
    """The base model. ``create`` is the preset of a new model, which is made if ``path`` does not exist.

    ``tokenizer``: a model whose tokenizer the new one copies; None: one is trained on the training rows.
    """

    path: str
    create: str | None = choice("10m", "85m", "400m", "800m")
    tokenizer: str | None


@dataclass(kw_only=True)
class Data:
    """The rows: their path, their splits, and which findings are only warnings."""

    path: str
    columns: Any  # a mapping; typed, OmegaConf could not merge one into null
    held_out_fraction: float = number(above=0, at_most=0.4)
    near_duplicate_similarity: float = number(at_least=0.5, at_most=1)
    downgrade: list[str] | None


@dataclass(kw_only=True)
class Train:
    """Settings of the training. None: use the recommendation; a limit or check is off."""

    method: str = choice("lora", "dora", *WHOLE, *PAIRED)
    beta: float = number(above=0, at_most=10)
    from_adapter: str | None
    optimizer: str = choice("adam", "adamw", "muon")
    schedule: str = choice("cosine", "linear", "constant", "wsd")
    batch_size: int | None = number(at_least=1, at_most=1024)
    gradient_accumulation: int | None = number(at_least=1, at_most=4096)
    max_seq_length: int | None = number(at_least=8, at_most=1_048_576)
    learning_rate: float | None = number(above=0, at_most=1)
    num_epochs: int | None = number(at_least=1, at_most=10_000)
    max_steps: int | None = number(at_least=1)
    minutes: float | None = number(above=0)
    max_examples: int | None = number(at_least=1)
    warmup_steps: int | None = number(at_least=0)
    save_steps: int | None = number(at_least=1)
    eval_steps: int | None = number(at_least=1)
    log_steps: int | None = number(at_least=1)
    max_grad_norm: float = number(above=0)
    weight_decay: float = number(at_least=0, at_most=1)
    early_stopping_patience: int | None = number(at_least=1)
    max_loss_jump: float | None = number(above=0)
    dequantize_base: bool | None
    stream_base: bool | None
    gradient_checkpointing: bool | None
    compute_dtype: str | None = choice("float32", "bfloat16", "float16")
    seed: int = number(at_least=0, at_most=2**32 - 1)
    keep_checkpoints: int = number(at_least=1, at_most=1000)
    memory_limit_gb: float | None = number(above=0)
    hang_minutes: float = number(above=0, at_most=10_000)
    trace: str = choice("none", "phases")
    ranks: int = number(at_least=1, at_most=1024)

    @property
    def lacks_rate(self) -> str:
        """Why the learning rate must be set; empty if one is set or recommended."""
        if self.learning_rate is not None or self.optimizer != "muon" or self.method == PRETRAIN:
            return ""  # in pretraining Muon's steps are as large as Adam's
        return "train.optimizer = muon has no recommended rate: set train.learning_rate"


@dataclass(kw_only=True)
class Lora:
    """Settings of the adapter. None: use the recommendation."""

    rank: int | None = number(at_least=1, at_most=1024)
    scale: float | None = number(above=0, at_most=1000)
    dropout: float | None = number(at_least=0, at_most=0.9)
    num_layers: int | None = number(at_least=1)
    targets: list[str] | None


@dataclass(kw_only=True)
class Evaluate:
    """Settings for the comparison of base and tuned model on the test rows."""

    max_examples: int | None = number(at_least=1)
    max_new_tokens: int | None = number(at_least=1, at_most=4096)
    score: str | None = choice(TEXT, CHOICE, JSON, TOOLS, CHECKER)
    schema: str | None
    checker: str | None


@dataclass(kw_only=True)
class Gate:
    """Thresholds of `safetrain result --gate`, losses in nats; None: not checked."""

    least_gain: float = number(at_least=-100, at_most=100)
    least_score: float | None = number(at_least=0, at_most=0.99)
    most_forgotten: float | None = number(at_least=0, at_most=100)


@dataclass(kw_only=True)
class Preflight:
    """Settings of the checks before a training run."""

    level: str = choice("quick", "probe", "certify")
    downgrade: list[str] | None


@dataclass(kw_only=True)
class Pipeline:
    """The whole configuration, one section per subject."""

    model: Model
    data: Data
    train: Train
    lora: Lora
    evaluate: Evaluate
    gate: Gate
    preflight: Preflight

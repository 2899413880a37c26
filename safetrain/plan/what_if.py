"""What fits on another machine or in a given memory, by a model's headers or its config.json alone."""

import dataclasses
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from safetrain.core.errors import ConfigError
from safetrain.core.memory.budget import MemoryBudget, cuda_budget_bytes, metal_budget_bytes
from safetrain.core.memory.estimate import (
    MARGIN,
    fits,
    predicted_peak,
    require_computable,
    require_trainable,
    total_bytes,
    with_margin,
)
from safetrain.core.memory.terms import Backend, Shape, backend_of, padded
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine
from safetrain.core.records.schema import CHOICES, WHOLE, Train, describe_allowed
from safetrain.core.records.settings import LoraSettings, MemoryTerm
from safetrain.plan.nearest import Shortage, what_would_fit

PROFILES = Path("conf/machine")
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (64, 32, 16, 8, 4, 2, 1)
LEAST_RANK, HALVED_BLOCKS, SHORTEST_ROWS = 8, 2, 128  # as far down as the remedies go
GIB = 2**30


@dataclass(frozen=True)
class Profile:
    """A machine that is only described."""

    name: str
    chip: str
    backend: str
    total_memory_gb: float
    usable_memory_gb: float  # what its device lets one process use: the working set of Metal, what is free of a GPU
    source: str
    usable_memory_gb_macos_26: float | None = None  # where macOS 26 gives more
    compute_dtype: str | None = None  # of a base in bfloat16, where that is emulated
    tflops: float | None = None  # 10^12 operations a second in training, as measured or assumed; None: not known
    watts: float | None = None  # under load
    usd_per_hour: float | None = None  # of one that can be rented


@dataclass(frozen=True)
class TrainingOptions:
    """How a training is to run, as far as memory is concerned."""

    lora: LoraSettings
    method: str
    checkpointing: bool
    dequantize: bool
    accumulates: bool = True  # an update has several micro-batches
    optimizer: str = "adam"
    compute_dtype: str | None = None  # None: as the base is stored


@dataclass(frozen=True)
class Suggestion:
    """One step down from what does not fit, with all the steps before it."""

    keys: tuple[str, ...]  # as they are typed
    estimate: "Estimate"


@dataclass(frozen=True)
class Estimate:
    """What one shape is predicted to need."""

    terms: tuple[MemoryTerm, ...]
    budget: MemoryBudget

    @property
    def peak_bytes(self) -> int:
        """Of mlx's allocator."""
        return total_bytes(self.terms)

    @property
    def margin_bytes(self) -> int:
        """Kept free beside the peak."""
        return with_margin(self.terms) - self.peak_bytes

    @property
    def needed_bytes(self) -> int:
        """With margin and the process around it."""
        return with_margin(self.terms) + self.budget.process_bytes

    @property
    def fits(self) -> bool:
        """Whether it is within the budget."""
        return fits(self.terms, self.budget)


ANY_GPU = Machine("", "", "", "a GPU", 8, "gpu", "", "", "", 2**60, 2**60)
ANY_CPU = dataclasses.replace(ANY_GPU, chip="a CPU", backend="cpu")


def profile_names(folder: Path = PROFILES) -> list[str]:
    """Machines that can be asked about."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_profile(name: str, folder: Path = PROFILES) -> Profile:
    """A machine by its name; raises ConfigError with the names there are."""
    names = profile_names(folder)
    if not names:
        raise ConfigError("There are no machines to ask about here.", where=str(folder), do="go to the project's root")
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(
            f"There is no machine called {name}.",
            where=str(folder),
            expected=f"one of {', '.join(names)}",
            do=f"did you mean {near[0]}?" if near else f"add {folder / name}.yaml, or say --memory-gb",
        )
    value = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
    if not isinstance(value, dict):
        raise ConfigError("A machine is a few keys.", where=str(folder / f"{name}.yaml"))
    try:
        return Profile(name=name, **{str(key): found for key, found in value.items()})
    except TypeError as error:
        raise ConfigError(f"The machine cannot be read: {error}", where=str(folder / f"{name}.yaml")) from None


def machine_of(profile: Profile, *, macos_26: bool = False) -> Machine:
    """The record that preflight would write there, its budget by preflight's own rules for an idle machine."""
    newer = profile.usable_memory_gb_macos_26 if macos_26 else None
    usable, total = int((newer or profile.usable_memory_gb) * GIB), int(profile.total_memory_gb * GIB)
    if profile.backend == "metal":
        usable = metal_budget_bytes(usable, total)
    elif profile.backend == "cuda":
        usable = cuda_budget_bytes(usable)
    return Machine(
        system="", architecture="", python="", chip=profile.chip, physical_cores=8, backend=profile.backend,
        device=profile.chip, mlx="", mlx_lm="", total_memory_bytes=total,
        memory_budget_bytes=usable, compute_dtype=profile.compute_dtype, quantized_compute_dtype=profile.compute_dtype,
    )  # fmt: skip


def with_memory(machine: Machine, memory_gb: float) -> Machine:
    """The same machine with this budget."""
    return dataclasses.replace(machine, memory_budget_bytes=int(memory_gb * GIB))


def default_run(model: ModelFiles, backend: str, method: str = "lora") -> TrainingOptions:
    """What the recommendation starts from: rank 16 on all linear layers, stored activations, dequantized on CPU."""
    lora = LoraSettings(16, 2.0, 0.0, model.num_layers, ("all-linear",))
    return TrainingOptions(
        lora, method, checkpointing=False, dequantize=backend == "cpu" and model.quantization_bits is not None
    )


def asked_run(
    model: ModelFiles, backend: str, method: str, rank: int, *, recompute: bool, num_layers: int | None = None,
    accumulate: bool = True, optimizer: str = "adam", compute_dtype: str | None = None,
) -> TrainingOptions:  # fmt: skip
    """The default run with what was asked for; raises ConfigError for what cannot be trained so."""
    require_choice("method", method)
    require_choice("optimizer", optimizer)
    require_choice("compute_dtype", compute_dtype)
    require_computable(compute_dtype, backend)
    if num_layers is not None and num_layers > model.num_layers:
        raise ConfigError(f"--num-layers is {num_layers}.", expected=f"at most {model.num_layers}, the model's blocks")
    require_trainable(method, quantized=model.quantization_bits is not None)
    run = default_run(model, backend, method)
    lora = dataclasses.replace(run.lora, rank=rank, num_layers=num_layers or model.num_layers)
    return dataclasses.replace(
        run, lora=lora, checkpointing=recompute, accumulates=accumulate, optimizer=optimizer,
        compute_dtype=compute_dtype,
    )  # fmt: skip


def require_choice(key: str, value: str | None) -> None:
    """Raise ConfigError for an option with a value that the key ``train.<key>`` does not admit."""
    choices = next(field for field in dataclasses.fields(Train) if field.name == key).metadata[CHOICES]
    allowed = describe_allowed("train", key)
    if value not in choices and not (value is None and allowed.endswith("or null")):
        raise ConfigError(f"There is no --{key.replace('_', '-')} {value}.", expected=allowed)


def would_fit(model: ModelFiles, machine: Machine, run: TrainingOptions, tokens: int) -> list[str]:
    """What would fit where not even one row of ``tokens`` does in the way that takes least memory."""
    backend = _backend(model, machine, cheapest(run))
    shortage = Shortage(model, run.lora, Shape(1, padded(tokens), True), backend, MARGIN, machine.memory_budget)
    return what_would_fit(shortage, machine.backend)


def estimate(model: ModelFiles, machine: Machine, run: TrainingOptions, batch_size: int, tokens: int) -> Estimate:
    """The memory of micro-batches of this shape, term by term."""
    shape = Shape(batch_size, padded(tokens), run.accumulates)
    terms = predicted_peak(model, run.lora, shape, _backend(model, machine, run))
    return Estimate(terms, machine.memory_budget)


def _backend(model: ModelFiles, machine: Machine, run: TrainingOptions) -> Backend:
    return backend_of(
        model, machine.backend, run.dequantize, run.method, checkpointing=run.checkpointing,
        optimizer=run.optimizer, compute_dtype=run.compute_dtype,
    )  # fmt: skip


def as_planned(
    model: ModelFiles, machine: Machine, run: TrainingOptions, batch_size: int, tokens: int
) -> TrainingOptions:
    """The run with its base left quantized where it fits only so, as recommend_config would choose."""
    quantized = dataclasses.replace(run, dequantize=False)
    dequantized_fits = estimate(model, machine, run, batch_size, tokens).fits
    return run if dequantized_fits or not estimate(model, machine, quantized, batch_size, tokens).fits else quantized


def largest_batch(model: ModelFiles, machine: Machine, run: TrainingOptions, tokens: int) -> int:
    """The largest micro-batch of rows this long that fits, 0 if none does."""
    return next((size for size in BATCHES if estimate(model, machine, run, size, tokens).fits), 0)


def remedies(
    model: ModelFiles, machine: Machine, run: TrainingOptions, batch_size: int, tokens: int
) -> list[Suggestion]:
    """What to change where a shape does not fit: step by step, each with all before it, until it fits.

    In the order of what they cost: fewer rows at a time, a base left quantized, recomputed blocks and a slower type
    cost time; a lower rank, fewer blocks and shorter rows cost what can be learnt.
    """
    found: list[Suggestion] = []
    keys: dict[str, str] = {}
    for key, value, less, rows, length in _steps(model, machine, run, batch_size, tokens):
        keys[key] = value
        here = estimate(model, machine, less, rows, length)
        typed = tuple(f"{name}={text}" for name, text in keys.items())
        found.append(Suggestion(typed, here))
        if here.fits:
            break
    return found


def _steps(
    model: ModelFiles, machine: Machine, run: TrainingOptions, batch_size: int, tokens: int
) -> Iterator[tuple[str, str, TrainingOptions, int, int]]:
    """Key and value of each step, and what the training is then."""

    while batch_size > 1:
        batch_size //= 2
        yield "train.batch_size", str(batch_size), run, batch_size, tokens
    if run.dequantize and model.quantization_bits is not None:
        run = dataclasses.replace(run, dequantize=False)
        yield "train.dequantize_base", "false", run, batch_size, tokens
    if not run.checkpointing:
        run = dataclasses.replace(run, checkpointing=True)
        yield "train.gradient_checkpointing", "true", run, batch_size, tokens
    if run.compute_dtype == "float32" and machine.backend != "cpu":
        run = dataclasses.replace(run, compute_dtype="bfloat16")
        yield "train.compute_dtype", "bfloat16", run, batch_size, tokens
    while run.method not in WHOLE and run.lora.rank > LEAST_RANK:
        run = dataclasses.replace(run, lora=dataclasses.replace(run.lora, rank=max(LEAST_RANK, run.lora.rank // 2)))
        yield "lora.rank", str(run.lora.rank), run, batch_size, tokens
    for _ in range(HALVED_BLOCKS):
        run = dataclasses.replace(run, lora=dataclasses.replace(run.lora, num_layers=max(1, run.lora.num_layers // 2)))
        yield "lora.num_layers", str(run.lora.num_layers), run, batch_size, tokens
    while tokens > SHORTEST_ROWS:
        tokens = max(SHORTEST_ROWS, tokens // 2)
        yield "train.max_seq_length", str(tokens), run, batch_size, tokens


def cheapest(run: TrainingOptions) -> TrainingOptions:
    """The same training with as little memory as it can take."""
    return dataclasses.replace(run, checkpointing=True, dequantize=False)

"""What would fit on another machine, or with so much memory: from a model's headers or its config.json alone."""

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from safetrain.core.errors import ConfigError
from safetrain.core.memory import MARGIN, fits, needed_bytes, predicted_peak, require_trainable, total_bytes
from safetrain.core.memory_budget import cuda_budget_bytes, metal_budget_bytes
from safetrain.core.memory_terms import Shape, backend_of, padded
from safetrain.core.model_files import ModelFiles
from safetrain.core.reports import Machine
from safetrain.core.settings import LoraSettings, MemoryTerm
from safetrain.plan.nearest import Tight, what_would_fit

METHODS = ("lora", "dora", "full")
PROFILES = Path("conf/machine")
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (64, 32, 16, 8, 4, 2, 1)
GIB = 2**30


@dataclass(frozen=True)
class Profile:
    """A machine that one does not have."""

    name: str
    chip: str
    backend: str
    total_memory_gb: float
    usable_memory_gb: float  # what its device lets one process use
    source: str


@dataclass(frozen=True)
class Run:
    """How a training is to run, as far as memory is concerned."""

    lora: LoraSettings
    method: str
    checkpointing: bool
    dequantize: bool
    optimizer: str = "adam"
    optimizer_state_bits: int = 32


@dataclass(frozen=True)
class Estimate:
    """What one shape is predicted to need."""

    terms: tuple[MemoryTerm, ...]
    budget_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Of mlx's allocator."""
        return total_bytes(self.terms)

    @property
    def needed_bytes(self) -> int:
        """With margin and the process around it."""
        return needed_bytes(self.peak_bytes)

    @property
    def fits(self) -> bool:
        """Whether it is within the budget."""
        return fits(self.peak_bytes, self.budget_bytes)


@dataclass(frozen=True)
class OldRow:
    """A row of the table that this estimate replaces: it went by memory alone, whatever the model."""

    memory_gb: float
    batch_size: int
    gradient_accumulation: int
    max_seq_length: int


OLD_TABLE = (
    OldRow(5, 1, 8, 128), OldRow(7, 1, 4, 256), OldRow(8, 2, 2, 512), OldRow(16, 4, 2, 512), OldRow(32, 8, 1, 512)
)  # fmt: skip


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


def machine_of(profile: Profile) -> Machine:
    """The record that preflight would write there, its budget by preflight's own rules for an idle machine."""
    usable, total = int(profile.usable_memory_gb * GIB), int(profile.total_memory_gb * GIB)
    if profile.backend == "metal":
        usable = metal_budget_bytes(usable, total, total)
    elif profile.backend == "cuda":
        usable = cuda_budget_bytes(usable)
    return Machine(
        system="", architecture="", python="", chip=profile.chip, physical_cores=8, backend=profile.backend,
        device=profile.chip, mlx="", mlx_lm="", total_memory_bytes=total,
        memory_budget_bytes=usable,
    )  # fmt: skip


def with_memory(machine: Machine, memory_gb: float) -> Machine:
    """The same machine with this budget."""
    return dataclasses.replace(machine, memory_budget_bytes=int(memory_gb * GIB))


def default_run(model: ModelFiles, backend: str, method: str = "lora") -> Run:
    """What the recommendation starts from: rank 16 on all linear layers, stored activations, unpacked on CPU."""
    lora = LoraSettings(16, 2.0, 0.0, model.num_layers, ("all-linear",))
    return Run(lora, method, checkpointing=False, dequantize=backend == "cpu" and model.quantization_bits is not None)


def asked_run(model: ModelFiles, backend: str, method: str, rank: int, *, recompute: bool) -> Run:
    """The default run with what was asked for; raises ConfigError for what cannot be trained so."""
    if method not in METHODS:
        raise ConfigError(f"There is no method {method}.", expected=", ".join(METHODS))
    require_trainable(method, packed=model.quantization_bits is not None)
    run = default_run(model, backend, method)
    return dataclasses.replace(run, lora=dataclasses.replace(run.lora, rank=rank), checkpointing=recompute)


def would_fit(model: ModelFiles, machine: Machine, run: Run, tokens: int) -> list[str]:
    """What would fit where one row of so many tokens does not, with as little memory as a training can take."""
    backend = backend_of(
        model, machine.backend, False, run.method, checkpointing=True,
        optimizer=run.optimizer, optimizer_state_bits=run.optimizer_state_bits,
    )  # fmt: skip
    tight = Tight(model, run.lora, Shape(1, padded(tokens), True), backend, MARGIN, machine.memory_budget_bytes)
    return what_would_fit(tight, machine.backend)


def estimate(model: ModelFiles, machine: Machine, run: Run, batch_size: int, tokens: int) -> Estimate:
    """The memory of micro-batches of this shape, term by term."""
    backend = backend_of(
        model, machine.backend, run.dequantize, run.method, checkpointing=run.checkpointing,
        optimizer=run.optimizer, optimizer_state_bits=run.optimizer_state_bits,
    )  # fmt: skip
    terms = predicted_peak(model, run.lora, Shape(batch_size, padded(tokens), True), backend)
    return Estimate(terms, machine.memory_budget_bytes)


def as_planned(model: ModelFiles, machine: Machine, run: Run, batch_size: int, tokens: int) -> Run:
    """The run with its base left packed where it fits only so, as recommend_config would choose."""
    packed = dataclasses.replace(run, dequantize=False)
    unpacked_fits = estimate(model, machine, run, batch_size, tokens).fits
    return run if unpacked_fits or not estimate(model, machine, packed, batch_size, tokens).fits else packed


def largest_batch(model: ModelFiles, machine: Machine, run: Run, tokens: int) -> int:
    """The largest micro-batch of rows this long that fits, 0 if none does."""
    return next((size for size in BATCHES if estimate(model, machine, run, size, tokens).fits), 0)


def cheapest(run: Run) -> Run:
    """The same training with as little memory as it can take."""
    return dataclasses.replace(run, checkpointing=True, dequantize=False)

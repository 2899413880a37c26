"""Machines to estimate for: this one, and those that conf/machine describes."""

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from safetrain.core.errors import ConfigError
from safetrain.core.memory.budget import cuda_budget_bytes, metal_budget_bytes
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine, read_machine
from safetrain.core.records.settings import read_recommendation
from safetrain.core.storage import paths
from safetrain.plan.machine import measured_machine
from safetrain.plan.speed import Link, Speed

PROFILES = Path("conf/machine")
HERE = "this machine"
CPU_SHARE = 0.5  # of the speed of a matrix product, in training (measured: benchmarks/bench_throughput, 0.4 to 0.6)
MEASURE = "to measure it: safetrain stage recommend_config"
GIB = 2**30
USUAL_LINK = Link(1.0)
ANY_GPU = Machine("", "", "", "a GPU", 8, "gpu", "", "", "", 2**60, 2**60)
ANY_CPU = dataclasses.replace(ANY_GPU, chip="a CPU", backend="cpu")


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

    @property
    def speed(self) -> Speed:
        """By its operations a second."""
        where = PROFILES / f"{self.name}.yaml"
        if self.tflops is None:
            return Speed(None, f"not known: no tflops in {where}")
        return Speed(self.tflops, f"assumed: {self.tflops:g} TFLOP/s, {where}")


@dataclass(frozen=True)
class TrainingPlace:
    """Where to train: ``ranks`` machines, linked. Without a ``profile`` it is this one."""

    name: str
    machine: Machine
    profile: Profile | None = None
    ranks: int = 1
    link: Link = USUAL_LINK

    def speed(self, model: ModelFiles, method: str) -> Speed:
        """Its speed in this training."""
        return self.profile.speed if self.profile else speed_here(model, self.machine, method)

    @property
    def watts(self) -> float | None:
        """Power of one machine under load."""
        return self.profile.watts if self.profile else None

    @property
    def usd_per_hour(self) -> float | None:
        """Price of one machine."""
        return self.profile.usd_per_hour if self.profile else None


def place_of(
    name: str | None, macos_26: bool = False, memory_gb: float | None = None, ranks: int | None = None,
    link: Link = USUAL_LINK, probe_module: str = "",
) -> TrainingPlace:  # fmt: skip
    """A machine of conf/machine, or this one where ``name`` is None; raises ConfigError where it is not known.

    This one is as preflight wrote it down, else ``probe_module`` asks it now (about two seconds); MachineError where
    mlx does not work.
    """
    profile = read_profile(name) if name else None
    if profile:
        machine = machine_of(profile, macos_26=macos_26)
    else:
        is_known = paths.MACHINE.is_file() or not probe_module
        machine = read_machine(paths.MACHINE) if is_known else measured_machine(probe_module)
    if memory_gb:
        machine = dataclasses.replace(machine, memory_budget_bytes=int(memory_gb * GIB))
    return TrainingPlace(name or HERE, machine, profile, ranks or 1, link)


def profiles() -> Path:
    """The folder of machines: this project's own, else the program's."""
    return PROFILES if PROFILES.is_dir() else paths.shipped(str(PROFILES))


def profile_names(folder: Path | None = None) -> list[str]:
    """Machines that conf/machine describes; raises ConfigError where there are none."""
    folder = folder or profiles()
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if not names:
        raise ConfigError("No machines found.", where=str(folder), do="go to the project's root")
    return names


def read_profile(name: str, folder: Path | None = None) -> Profile:
    """A machine by its name; raises ConfigError with the names there are."""
    folder = folder or profiles()
    names, path = profile_names(folder), folder / f"{name}.yaml"
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(
            f"Unknown machine {name}.",
            where=str(folder),
            expected=f"one of {', '.join(names)}",
            do=f"did you mean {near[0]}?" if near else f"add {path}, or say --memory-gb",
        )
    value = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(value, dict):
        raise ConfigError("A machine is a few keys.", where=str(path))
    try:
        return Profile(name=name, **{str(key): setting for key, setting in value.items()})
    except TypeError as error:
        raise ConfigError(f"The machine cannot be read: {error}", where=str(path)) from None


def machine_of(profile: Profile, *, macos_26: bool = False) -> Machine:
    """The record that preflight would write there, its budget by preflight's own rules for an idle machine."""
    newer = profile.usable_memory_gb_macos_26 if macos_26 else None
    usable, total = int((newer or profile.usable_memory_gb) * GIB), int(profile.total_memory_gb * GIB)
    if profile.backend == "metal":
        usable = metal_budget_bytes(usable, total)
    elif profile.backend == "cuda":
        usable = cuda_budget_bytes(usable)
    return dataclasses.replace(
        ANY_GPU, chip=profile.chip, backend=profile.backend, device=profile.chip, total_memory_bytes=total,
        memory_budget_bytes=usable, compute_dtype=profile.compute_dtype, quantized_compute_dtype=profile.compute_dtype,
    )  # fmt: skip


def speed_here(model: ModelFiles, machine: Machine, method: str) -> Speed:
    """By a dry run of this model and method, where there was one; else by the speed of a matrix product on a CPU."""
    try:
        planned = read_recommendation(paths.RECOMMENDED_CONFIG)
    except ConfigError:
        planned = None
    if planned is not None and planned.step_seconds is not None:
        plan_key = (planned.planned_model, planned.planned_method, planned.planned_backend)
        if plan_key == (str(model.folder), method, machine.backend):
            rows = planned.batch_size * planned.gradient_accumulation
            source = f"measured: {planned.step_seconds:.3g} s an update of {rows} rows, a dry run"
            return Speed(None, source, planned.step_seconds, rows, planned.max_seq_length)
    if tflops := assumed_tflops(machine):
        source = f"assumed: {tflops:.2g} TFLOP/s, half of the speed of a matrix product that preflight measured"
        return Speed(tflops, f"{source}; {MEASURE}")
    return Speed(None, f"not known; {MEASURE}")


def assumed_tflops(machine: Machine) -> float | None:
    """10^12 operations a second of a training, by what preflight measured; None: not known."""
    if machine.backend != "cpu" or not machine.gemm_gflops:
        return None
    return CPU_SHARE * machine.gemm_gflops / 1000

"""What the self-test's child processes say: a line of JSON for each value, so that all before a crash is kept."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFacts:
    """What mlx says of the device. Sizes in bytes, 0 where the backend does not say."""

    backend: str  # cpu, metal, cuda
    device: str
    architecture: str  # of the GPU: applegpu_g13g, compute capability 8.0
    working_set_bytes: int  # that Metal recommends
    free_bytes: int  # of a CUDA device
    process_bytes: int  # of a process that has loaded mlx and the engine, and no model
    blas: str


@dataclass(frozen=True)
class Shapes:
    """Sizes that a section used, in words."""

    text: str


@dataclass(frozen=True)
class Timed:
    """One operation: the fastest of a few runs, and mlx's peak beyond what there was before it."""

    name: str
    seconds: float
    peak_bytes: int
    failed: str = ""  # what mlx said instead


@dataclass(frozen=True)
class UpdateCost:
    """An optimizer update: the fastest of a few, and mlx's peak over them, weights included."""

    name: str
    seconds: float
    peak_bytes: int
    still_bytes: int  # mlx's memory between updates


@dataclass(frozen=True)
class Kernels:
    """Nodes of an update's graph that launch a kernel."""

    gradient: int
    optimizer: int
    mlx_lm: int  # of mlx_lm's compiled step, in all


@dataclass(frozen=True)
class Exactness:
    """Relative differences from mlx-lm's own layers and plain cross-entropy."""

    name: str
    loss_difference: float
    gradient_difference: float
    in_float32: bool
    on_cpu: bool


@dataclass(frozen=True)
class ProcessMemory:
    """A process after an update, in bytes: what the system charges to it, what is resident, what is mlx's."""

    footprint_bytes: int
    resident_bytes: int
    mlx_active_bytes: int
    mlx_cache_bytes: int


@dataclass(frozen=True)
class Flushes:
    """Seconds to make a megabyte durable; None where the system has no F_FULLFSYNC, or refused it."""

    fsync_seconds: float
    full_seconds: float | None


@dataclass(frozen=True)
class DirtyPages:
    """Whether the kernel calls a page modified that was written through mmap, after each of these in turn."""

    written: bool
    fsync: bool
    full: bool  # F_FULLFSYNC
    msync: bool


Line = DeviceFacts | Shapes | Timed | UpdateCost | Kernels | Exactness | ProcessMemory | Flushes | DirtyPages
KINDS: tuple[type[Line], ...] = (
    DeviceFacts, Shapes, Timed, UpdateCost, Kernels, Exactness, ProcessMemory, Flushes, DirtyPages,
)  # fmt: skip

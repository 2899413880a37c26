"""Single changes that would make a training fit: fewer or shorter rows, fewer blocks, fewer bits, a smaller base."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from safetrain.core.formatting import size_text
from safetrain.core.memory.budget import MemoryBudget
from safetrain.core.memory.estimate import predicted_peak, with_margin
from safetrain.core.memory.terms import NUMBER_BYTES, WIDTH_STEP, Backend, Shape
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.schema import WHOLE
from safetrain.core.records.settings import LoraSettings

FEWER_BITS = (4, 3, 2)
BITS_OF_SCALES = 0.5  # for each weight: two 16-bit numbers for 64
SHORTEST_ROWS = 64
SMALLEST_BASE_MILLIONS = 1.0


@dataclass(frozen=True)
class Shortage:
    """The smallest form of a training that does not fit, and the memory budget."""

    model: ModelFiles
    lora: LoraSettings
    shape: Shape
    backend: Backend
    budget: MemoryBudget

    @property
    def needed_bytes(self) -> int:
        """With margin and the process around it."""
        terms = predicted_peak(self.model, self.lora, self.shape, self.backend)
        return with_margin(terms) + self.budget.process_bytes

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.needed_bytes <= self.budget.total_bytes

    def with_shape(self, rows: int, tokens: int) -> "Shortage":
        """The same with other rows."""
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, rows=rows, tokens=tokens))


def what_would_fit(shortage: Shortage) -> list[str]:
    """Changes of which each alone would make it fit, with what it would need then."""
    tokens = shortage.shape.tokens
    fewer = _first(range(shortage.shape.rows - 1, 0, -1), lambda rows: shortage.with_shape(rows, tokens))
    if fewer is not None:
        return [_told(f"train.batch_size={fewer.shape.rows}", fewer)]
    one = shortage.with_shape(1, tokens)
    found = [_in_16_bits(one), _shorter(one), _fewer_blocks(one), _fewer_bits(one)]
    return [text for text in found if text] or [_smaller_base(one)]


def _told(change: str, shortage: Shortage) -> str:
    return f"{change} ({size_text(shortage.needed_bytes)})"


def _first(candidates: Iterable[int], changed: Callable[[int], Shortage]) -> Shortage | None:
    return next((other for other in map(changed, candidates) if other.fits), None)


def _in_16_bits(shortage: Shortage) -> str:
    """Half the activation memory; offered only where float32 was chosen because it is faster here."""
    if shortage.backend.compute_dtype != "float32" or shortage.backend.method in WHOLE:
        return ""
    backend = dataclasses.replace(shortage.backend, compute_dtype="bfloat16", compute_bytes=NUMBER_BYTES["bfloat16"])
    other = dataclasses.replace(shortage, backend=backend)
    return _told("train.compute_dtype=bfloat16", other) if other.fits else ""


def _shorter(shortage: Shortage) -> str:
    lengths = range((shortage.shape.tokens - 1) // WIDTH_STEP * WIDTH_STEP, SHORTEST_ROWS - 1, -WIDTH_STEP)
    best = _first(lengths, lambda length: shortage.with_shape(1, length))
    return "" if best is None else _told(f"train.max_seq_length={best.shape.tokens}", best)


def _fewer_blocks(shortage: Shortage) -> str:
    def with_blocks(count: int) -> Shortage:
        return dataclasses.replace(shortage, lora=dataclasses.replace(shortage.lora, num_layers=count))

    best = _first(range(shortage.lora.num_layers - 1, 0, -1), with_blocks)
    return "" if best is None else _told(f"lora.num_layers={best.lora.num_layers}", best)


def _fewer_bits(shortage: Shortage) -> str:
    """A float base quantized; only for LoRA, because quantized weights cannot be trained."""
    if shortage.model.quantization_bits is not None or shortage.backend.method in WHOLE:
        return ""

    def with_bits(bits: int) -> Shortage:
        scales = BITS_OF_SCALES * (2 if shortage.backend.compute_dtype == "float32" else 1)
        size = int(shortage.model.parameters * (bits + scales) / 8)
        model = dataclasses.replace(shortage.model, static_bytes=size, quantization_bits=bits)
        backend = dataclasses.replace(shortage.backend, dequantize_base=False, compute_dtype=None)  # its size is known
        return dataclasses.replace(shortage, model=model, backend=backend)

    best, folder = _first(FEWER_BITS, with_bits), shortage.model.folder
    if best is None:
        return ""
    bits = best.model.quantization_bits
    return _told(f"safetrain convert {folder} {folder}-{bits}bit --bits {bits}", best)


def _smaller_base(shortage: Shortage) -> str:
    """In proportion: weights, adapter and activations all shrink with the base."""
    process = shortage.budget.process_bytes
    share = shortage.budget.mlx_bytes / max(1, shortage.needed_bytes - process)
    millions = share * shortage.model.parameters / 1e6
    if millions < SMALLEST_BASE_MILLIONS:
        return f"a machine with more memory (Python and mlx alone take {size_text(process)})"
    return f"a base of about {millions:,.0f} million parameters or fewer"

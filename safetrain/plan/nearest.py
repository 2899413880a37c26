"""What would fit where nothing does: fewer or shorter rows, fewer blocks, fewer bits, a smaller base."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from safetrain.core.errors import SafetrainError
from safetrain.core.memory import MARGIN, predicted_peak, with_margin
from safetrain.core.memory_budget import MemoryBudget
from safetrain.core.memory_terms import NUMBER_BYTES, WIDTH_STEP, Backend, Shape, backend_of
from safetrain.core.model_files import ModelFiles, read_model_files
from safetrain.core.model_shapes import is_known
from safetrain.core.settings import LoraSettings
from safetrain.core.words import size_text

FEWER_BITS = (4, 3, 2)
BITS_OF_SCALES = 0.5  # for each weight: two 16-bit numbers for 64
SHORTEST_ROWS = 64
MOST_BASES = 3
SMALLEST_BASE_MILLIONS = 1.0


@dataclass(frozen=True)
class Tight:
    """The least that a training could take, and the room there is."""

    model: ModelFiles
    lora: LoraSettings
    shape: Shape
    backend: Backend
    factor: float  # one and the margin
    budget: MemoryBudget

    @property
    def needed_bytes(self) -> int:
        """With margin and the process around it."""
        terms = predicted_peak(self.model, self.lora, self.shape, self.backend)
        return with_margin(terms, self.factor) + self.budget.process_bytes

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.needed_bytes <= self.budget.total_bytes

    def with_shape(self, rows: int, tokens: int) -> "Tight":
        """The same with other rows."""
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, rows=rows, tokens=tokens))


def what_would_fit(tight: Tight, backend_name: str) -> list[str]:
    """Changes that would make it fit, one at a time, each with what it would need then."""
    fewer = _first(range(tight.shape.rows - 1, 0, -1), lambda rows: tight.with_shape(rows, tight.shape.tokens))
    if fewer is not None:
        return [f"train.batch_size={fewer.shape.rows} ({size_text(fewer.needed_bytes)})"]
    one = tight.with_shape(1, tight.shape.tokens)
    found = [_in_16_bits(one), _shorter(one), _fewer_blocks(one), _fewer_bits(one), *_other_bases(one, backend_name)]
    told = [text for text in found if text]
    return told or [_smaller_base(one)]


def _in_16_bits(tight: Tight) -> str:
    """Slower where the machine was found to be, and half of the activations."""
    if tight.backend.compute_dtype != "float32" or tight.backend.method == "full":
        return ""
    backend = dataclasses.replace(tight.backend, compute_dtype="bfloat16", compute_bytes=NUMBER_BYTES["bfloat16"])
    other = dataclasses.replace(tight, backend=backend)
    return f"train.compute_dtype=bfloat16 ({size_text(other.needed_bytes)})" if other.fits else ""


def _shorter(tight: Tight) -> str:
    lengths = range((tight.shape.tokens - 1) // WIDTH_STEP * WIDTH_STEP, SHORTEST_ROWS - 1, -WIDTH_STEP)
    best = _first(lengths, lambda length: tight.with_shape(1, length))
    return "" if best is None else f"train.max_seq_length={best.shape.tokens} ({size_text(best.needed_bytes)})"


def _fewer_blocks(tight: Tight) -> str:
    def with_blocks(count: int) -> Tight:
        return dataclasses.replace(tight, lora=dataclasses.replace(tight.lora, num_layers=count))

    best = _first(range(tight.lora.num_layers - 1, 0, -1), with_blocks)
    return "" if best is None else f"lora.num_layers={best.lora.num_layers} ({size_text(best.needed_bytes)})"


def _fewer_bits(tight: Tight) -> str:
    """A float base quantized; only for LoRA, because packed weights cannot be trained."""
    if tight.model.quantization_bits is not None or tight.backend.method == "full":
        return ""

    def with_bits(bits: int) -> Tight:
        scales = BITS_OF_SCALES * (2 if tight.backend.compute_dtype == "float32" else 1)
        size = int(tight.model.parameters * (bits + scales) / 8)
        model = dataclasses.replace(tight.model, static_bytes=size, quantization_bits=bits)
        backend = dataclasses.replace(tight.backend, dequantize_base=False, compute_dtype=None)  # its size is known
        return dataclasses.replace(tight, model=model, backend=backend)

    best = _first(FEWER_BITS, with_bits)
    if best is None:
        return ""
    bits, folder = best.model.quantization_bits, tight.model.folder
    return f"safetrain convert {folder} {folder}-{bits}bit --bits {bits} ({size_text(best.needed_bytes)})"


def _other_bases(tight: Tight, backend_name: str) -> list[str]:
    """Models beside this one that would fit by the closed form, the largest first."""
    found = []
    for file in sorted(tight.model.folder.parent.glob("*/config.json")):
        if file.parent == tight.model.folder:
            continue
        try:
            model = read_model_files(file.parent)
        except SafetrainError:
            continue
        packed_for_full = tight.backend.method == "full" and model.quantization_bits is not None
        too_short = model.max_positions is not None and model.max_positions < tight.shape.tokens
        if packed_for_full or too_short or not is_known(model.model_type):
            continue
        blocks = min(tight.lora.num_layers, model.num_layers)
        other = dataclasses.replace(
            tight, model=model, lora=dataclasses.replace(tight.lora, num_layers=blocks), factor=MARGIN,
            backend=backend_of(
                model, backend_name, False, tight.backend.method, checkpointing=True,
                optimizer=tight.backend.optimizer, optimizer_state_bits=tight.backend.optimizer_state_bits,
                compute_dtype=tight.backend.compute_dtype,
            ),
        )  # fmt: skip
        if other.fits:
            found.append((model.parameters, f"model.path={file.parent} ({size_text(other.needed_bytes)})"))
    return [text for _, text in sorted(found, reverse=True)[:MOST_BASES]]


def _smaller_base(tight: Tight) -> str:
    """In proportion: weights, adapter and activations all shrink with the base."""
    process = tight.budget.process_bytes
    share = tight.budget.mlx_bytes / max(1, tight.needed_bytes - process)
    millions = share * tight.model.parameters / 1e6
    if millions < SMALLEST_BASE_MILLIONS:
        return f"a machine with more memory (Python and mlx alone take {size_text(process)})"
    return f"a base of about {millions:,.0f} million parameters or fewer"


def _first(candidates: Iterable[int], changed: Callable[[int], Tight]) -> Tight | None:
    return next((other for other in map(changed, candidates) if other.fits), None)

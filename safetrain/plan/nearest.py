"""What would fit where nothing does: shorter rows, fewer blocks, fewer bits, a smaller base; each with its memory."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from safetrain.core.errors import SafetrainError
from safetrain.core.memory import PROCESS_BYTES, predicted_peak, total_bytes
from safetrain.core.memory_terms import WIDTH_STEP, Backend, Shape, backend_of
from safetrain.core.model_files import ModelFiles, read_model_files
from safetrain.core.settings import LoraSettings
from safetrain.core.words import size_text

FEWER_BITS = (4, 3, 2)
BITS_OF_SCALES = 0.5  # for each weight: two 16-bit numbers for 64
SHORTEST_ROWS = 64
MOST_BASES = 3


@dataclass(frozen=True)
class Tight:
    """The least that a training of one row at a time could take, and the room there is."""

    model: ModelFiles
    lora: LoraSettings
    length: int  # tokens of the longest row, padded
    accumulates: bool
    backend: Backend
    factor: float  # one and the margin
    budget_bytes: int

    @property
    def needed_bytes(self) -> int:
        """With margin and the process around it."""
        shape = Shape(1, self.length, self.accumulates)
        return (
            int(total_bytes(predicted_peak(self.model, self.lora, shape, self.backend)) * self.factor) + PROCESS_BYTES
        )

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.needed_bytes <= self.budget_bytes


def what_would_fit(tight: Tight, backend_name: str) -> list[str]:
    """Changes that would make it fit, one at a time, each with what it would need then."""
    found = [_shorter(tight), _fewer_blocks(tight), _fewer_bits(tight), *_other_bases(tight, backend_name)]
    told = [text for text in found if text]
    return told or [_smaller_base(tight)]


def _shorter(tight: Tight) -> str:
    lengths = range(tight.length // WIDTH_STEP * WIDTH_STEP, SHORTEST_ROWS - 1, -WIDTH_STEP)
    best = _first(lengths, lambda length: dataclasses.replace(tight, length=length))
    return "" if best is None else f"train.max_seq_length={best.length} ({_gib(best)})"


def _fewer_blocks(tight: Tight) -> str:
    def with_blocks(count: int) -> Tight:
        return dataclasses.replace(tight, lora=dataclasses.replace(tight.lora, num_layers=count))

    best = _first(range(tight.lora.num_layers - 1, 0, -1), with_blocks)
    return "" if best is None else f"lora.num_layers={best.lora.num_layers} ({_gib(best)})"


def _fewer_bits(tight: Tight) -> str:
    """The same base quantized; only for LoRA, because packed weights cannot be trained."""
    have = tight.model.quantization_bits or 8 * tight.model.compute_bytes
    if tight.backend.method == "full":
        return ""

    def with_bits(bits: int) -> Tight:
        size = int(tight.model.parameters * (bits + BITS_OF_SCALES) / 8)
        model = dataclasses.replace(tight.model, static_bytes=size, quantization_bits=bits)
        return dataclasses.replace(
            tight, model=model, backend=dataclasses.replace(tight.backend, dequantize_base=False)
        )

    best = _first((bits for bits in FEWER_BITS if bits < have), with_bits)
    if best is None:
        return ""
    bits = best.model.quantization_bits
    how = f"safetrain convert {tight.model.folder} {tight.model.folder}-{bits}bit --bits {bits}"
    return f"{how if tight.model.quantization_bits is None else f'this base in {bits} bits'} ({_gib(best)})"


def _other_bases(tight: Tight, backend_name: str) -> list[str]:
    """Models beside this one that would fit, the largest first."""
    found = []
    for folder in sorted(path.parent for path in tight.model.folder.resolve().parent.glob("*/config.json")):
        if folder == tight.model.folder.resolve():
            continue
        try:
            model = read_model_files(folder)
        except SafetrainError:
            continue
        blocks = min(tight.lora.num_layers, model.num_layers)
        other = dataclasses.replace(
            tight, model=model, lora=dataclasses.replace(tight.lora, num_layers=blocks),
            backend=backend_of(model, backend_name, False, tight.backend.method, checkpointing=True),
        )  # fmt: skip
        if other.fits:
            found.append((model.parameters, f"model.path={folder.parent.name}/{folder.name} ({_gib(other)})"))
    return [text for _, text in sorted(found, reverse=True)[:MOST_BASES]]


def _smaller_base(tight: Tight) -> str:
    """In proportion: weights, adapter and activations all shrink with the base."""
    share = max(0.0, tight.budget_bytes - PROCESS_BYTES) / max(1, tight.needed_bytes - PROCESS_BYTES)
    return f"a base of about {max(1, share * tight.model.parameters / 1e6):,.0f} million parameters or fewer"


def _first(candidates: Iterable[int], changed: Callable[[int], Tight]) -> Tight | None:
    return next((other for other in map(changed, candidates) if other.fits), None)


def _gib(tight: Tight) -> str:
    return size_text(tight.needed_bytes)

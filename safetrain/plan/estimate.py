"""The closed form for one training run: its memory, whether it fits, and what would fit instead."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import size_text
from safetrain.core.memory.estimate import (
    LEAST_SHARE,
    predicted_peak,
    require_computable,
    require_trainable,
    total_bytes,
    with_margin,
)
from safetrain.core.memory.terms import WIDTH_STEP, Backend, Shape, backend_of, padded
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine
from safetrain.core.records.schema import CHOICES, WHOLE, Train, describe_allowed
from safetrain.core.records.settings import ALL_LINEAR, LoraSettings, MemoryTerm

BATCHES = (64, 32, 16, 8, 4, 2, 1)
LEAST_RANK, HALVED_BLOCKS, LEAST_TOKENS = 8, 2, 128  # lowest values that remedies suggest
SHORTEST_ROWS = 64
FEWER_BITS = (4, 3, 2)
BITS_OF_SCALES = 0.5  # per weight: two 16-bit numbers for 64 weights
SMALLEST_BASE_MILLIONS = 1.0


@dataclass(frozen=True)
class Estimate:
    """What determines the memory of a training run: micro-batches of ``rows`` rows of up to ``tokens`` tokens."""

    model: ModelFiles
    machine: Machine
    lora: LoraSettings
    method: str = "lora"
    checkpointing: bool = False
    dequantize: bool = False
    optimizer: str = "adam"
    compute_dtype: str | None = None  # None: the stored type of the base
    accumulates: bool = True  # a step has several micro-batches
    rows: int = 1
    tokens: int = 512
    largest: Shape | None = None  # micro-batch of the real rows; None: all rows have the full length

    @property
    def micro_batch(self) -> Shape:
        """The largest micro-batch."""
        return self.largest or Shape(self.rows, padded(self.tokens), self.accumulates)

    @functools.cached_property
    def backend(self) -> Backend:
        """Backend settings of this training run."""
        return backend_of(
            self.model, self.machine.backend, self.dequantize, self.method, checkpointing=self.checkpointing,
            optimizer=self.optimizer, compute_dtype=self.compute_dtype,
        )  # fmt: skip

    @functools.cached_property
    def terms(self) -> tuple[MemoryTerm, ...]:
        """The terms of the peak of mlx's allocator."""
        return predicted_peak(self.model, self.lora, self.micro_batch, self.backend)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of mlx's allocator."""
        return total_bytes(self.terms)

    @property
    def needed_bytes(self) -> int:
        """Peak memory with its margin and the process around it."""
        return with_margin(self.terms) + self.machine.process_memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the memory is within the machine's budget."""
        return with_margin(self.terms) <= self.machine.memory_budget.mlx_bytes

    @property
    def may_fit(self) -> bool:
        """Whether a dry run is worthwhile: under a memory limit, mlx can run with less."""
        return with_margin(self.terms, LEAST_SHARE) <= self.machine.memory_budget.mlx_bytes

    @property
    def cheapest(self) -> "Estimate":
        """The same training run, changed to need the least memory."""
        return self.but(checkpointing=True, dequantize=False)

    def but(self, **changes: Any) -> "Estimate":
        """The same training run with these fields changed."""
        return dataclasses.replace(self, **changes)

    def with_blocks(self, count: int) -> "Estimate":
        """The same training run on the top ``count`` blocks."""
        return self.but(lora=dataclasses.replace(self.lora, num_layers=count))

    @property
    def as_planned(self) -> "Estimate":
        """The training run as recommend_config would plan it: the base stays quantized if only that fits."""
        quantized = self.but(dequantize=False)
        return quantized if not self.fits and quantized.fits else self

    @property
    def largest_batch(self) -> int:
        """The largest micro-batch of rows of this length that fits; 0 if none fits."""
        return next((rows for rows in BATCHES if self.but(rows=rows).fits), 0)


def estimate_of(
    model: ModelFiles, machine: Machine, method: str = "lora", rank: int = 16, *, num_layers: int | None = None,
    **options: Any,
) -> Estimate:  # fmt: skip
    """The requested training run; on a CPU, its base is dequantized. ``options`` are other fields of Estimate.

    Raises ConfigError for settings that training does not accept.
    """
    lora = LoraSettings(rank, 2.0, 0.0, num_layers or model.num_layers, (ALL_LINEAR,))
    dequantize = machine.backend == "cpu" and model.quantization_bits is not None
    estimate = Estimate(model, machine, lora, method, dequantize=dequantize, **options)
    for key in ("method", "optimizer", "compute_dtype"):
        _require_choice(key, getattr(estimate, key))
    require_computable(estimate.compute_dtype, machine.backend)
    if lora.num_layers > model.num_layers:
        raise ConfigError(f"--num-layers is {num_layers}.", expected=f"at most {model.num_layers} blocks")
    require_trainable(method, quantized=model.quantization_bits is not None)
    return estimate


def _require_choice(key: str, value: str | None) -> None:
    """Raise ConfigError if the key ``train.<key>`` does not allow the value."""
    choices = next(field for field in dataclasses.fields(Train) if field.name == key).metadata[CHOICES]
    allowed = describe_allowed("train", key)
    if value not in choices and not (value is None and allowed.endswith("or null")):
        raise ConfigError(f"Unknown value: --{key.replace('_', '-')} {value}.", expected=allowed)


def remedies(estimate: Estimate) -> list[tuple[str, Estimate]]:
    """Changes that make a run fit: each key includes the changes before it; the list ends at the first that fits.

    The cheapest come first: a smaller micro-batch, a quantized base, recomputation and a slower type cost time; a lower
    rank, fewer blocks and shorter rows limit what the model can learn.
    """
    steps = list[tuple[str, Estimate]]()
    for key, less in _steps(estimate):
        steps.append((key, less))
        if less.fits:
            break
    return steps


def _steps(run: Estimate) -> Iterator[tuple[str, Estimate]]:
    """Yield each key with its value, and the training run with that change."""
    while run.rows > 1:
        run = run.but(rows=run.rows // 2)
        yield f"train.batch_size={run.rows}", run
    if run.dequantize and run.model.quantization_bits is not None:
        run = run.but(dequantize=False)
        yield "train.dequantize_base=false", run
    if not run.checkpointing:
        run = run.but(checkpointing=True)
        yield "train.gradient_checkpointing=true", run
    if run.compute_dtype == "float32" and run.machine.backend != "cpu":
        run = run.but(compute_dtype="bfloat16")
        yield "train.compute_dtype=bfloat16", run
    while run.method not in WHOLE and run.lora.rank > LEAST_RANK:
        run = run.but(lora=dataclasses.replace(run.lora, rank=max(LEAST_RANK, run.lora.rank // 2)))
        yield f"lora.rank={run.lora.rank}", run
    for _ in range(HALVED_BLOCKS):
        run = run.with_blocks(max(1, run.lora.num_layers // 2))
        yield f"lora.num_layers={run.lora.num_layers}", run
    while run.tokens > LEAST_TOKENS:
        run = run.but(tokens=max(LEAST_TOKENS, run.tokens // 2))
        yield f"train.max_seq_length={run.tokens}", run


def what_would_fit(run: Estimate) -> list[str]:
    """Single changes that each make the smallest form of a training run fit, with the memory it then needs."""
    if fewer := _first(run.but(rows=rows) for rows in range(run.rows - 1, 0, -1)):
        return [_with_memory(f"train.batch_size={fewer.rows}", fewer)]
    one, texts = run.but(rows=1), list[str]()
    lengths = range((run.tokens - 1) // WIDTH_STEP * WIDTH_STEP, SHORTEST_ROWS - 1, -WIDTH_STEP)
    if shorter := _first(one.but(tokens=tokens) for tokens in lengths):
        texts.append(_with_memory(f"train.max_seq_length={shorter.tokens}", shorter))
    if fewer := _first(one.with_blocks(count) for count in range(run.lora.num_layers - 1, 0, -1)):
        texts.append(_with_memory(f"lora.num_layers={fewer.lora.num_layers}", fewer))
    may_quantize = run.model.quantization_bits is None and run.method not in WHOLE  # quantized weights stay frozen
    if may_quantize and (quantized := _first(_quantized(one, bits) for bits in FEWER_BITS)):
        folder, bits = run.model.folder, quantized.model.quantization_bits
        texts.append(_with_memory(f"safetrain convert {folder} {folder}-{bits}bit --bits {bits}", quantized))
    return texts or [_smaller_base(one)]


def _with_memory(change: str, run: Estimate) -> str:
    return f"{change} ({size_text(run.needed_bytes)})"


def _first(candidates: Iterable[Estimate]) -> Estimate | None:
    return next((each for each in candidates if each.fits), None)


def _quantized(run: Estimate, bits: int) -> Estimate:
    """The training run with its float base quantized."""
    scales = BITS_OF_SCALES * (2 if run.compute_dtype == "float32" else 1)
    size = int(run.model.parameters * (bits + scales) / 8)
    model = dataclasses.replace(run.model, static_bytes=size, quantization_bits=bits)
    if run.compute_dtype is not None:  # the size is final: no tensor counts as cast
        model = dataclasses.replace(model, tensors=tuple(dataclasses.replace(t, dtype="U32") for t in model.tensors))
    return run.but(model=model, dequantize=False)


def _smaller_base(run: Estimate) -> str:
    """Describe a base small enough to fit, by proportion: weights, adapter and activations shrink with it."""
    budget = run.machine.memory_budget
    share = budget.mlx_bytes / max(1, run.needed_bytes - budget.process_bytes)
    millions = share * run.model.parameters / 1e6
    if millions < SMALLEST_BASE_MILLIONS:
        return f"a machine with more memory (Python and mlx take {size_text(budget.process_bytes)})"
    return f"a base model with about {millions:,.0f} million parameters or fewer"

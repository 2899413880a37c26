"""Opens a base model with mlx-lm, ready to compute, in memory or block by block from disk.

A base that stays on disk is read one block at a time, and each block is dropped after use. mlx reads a lazy array from
its file when a computation needs it, and keeps it for the module that holds it. So after each use the module gets lazy
arrays again. They come from opening the model again, which reads no weights. They equal those of a base in memory,
because the same code renames, stacks and casts them.

To call blocks one by one, the model's own loop runs with stubs in place of its blocks. In one pass the stubs note their
arguments; in a later pass they return the last block's output. A comparison on a few tokens shows whether the results
are the model's own. In any other pass, as for answers, a stub reads its block, computes it and drops it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil

from safetrain.core.errors import ModelError
from safetrain.core.model.files import ModelFiles
from safetrain.engine.backend import device
from safetrain.engine.cpu.blas import blas_threads, cores
from safetrain.engine.layers import Randomness, Trained, give, inputs_of
from safetrain.engine.row_attention import Block, PackedRows
from safetrain.engine.upstream.adaptation import (
    Head,
    Refusal,
    SplitModel,
    adapt,
    asked,
    call_packed,
    refusals,
    through_few_blocks,
)
from safetrain.engine.upstream.generation import padding_refusal, wait_for_the_next_token
from safetrain.engine.upstream.loading import errors_told, load, ready_to_compute, require_own_head

OUTSIDE = -1  # block number of the weights outside of blocks: embedding, head, norms
PROBE_TOKENS = 8
LEAST_SHARED = 2**26  # multiplications in a mean product that several threads share (benchmarks/bench_threads.py)
ROWS_AS_SLOW = 16  # so many rows take as long as one: the weights have to be read
CANNOT_READ = ("[read]", "[load", "Unable to read", "Failed to open")  # in mlx's messages
AS_IT_WAS = "put the model back as it was, then run the same command: it continues from the last checkpoint"
Call = tuple[tuple[Any, ...], dict[str, Any]]  # a block's arguments after the hidden states: mask, cache, positions


class Blocks:
    """The blocks of a model whose weights stay on disk. ``pulse`` is called before each block."""

    def __init__(self, folder: Path, open_lazily: Callable[[], Any]) -> None:
        """``open_lazily`` returns a new module of the model in ``folder``, without reading its weights."""
        self._folder, self._open, self._stamps = folder, open_lazily, _stamps(folder)
        self._stream = mx.new_stream(mx.cpu)  # reads ahead while the device computes
        self.module = self._opened()
        self._owners = self._by_block(self.module)  # a layer keeps its object when an adapter wraps it
        self._unread: dict[int, dict[str, dict[str, mx.array]]] = {}
        self.parts: list[Any] = list(self.module.layers)
        self.pulse: Callable[[], None] = lambda: None
        self.given: dict[int, mx.array] = {}  # outputs of the last block, by the id of their shard
        self.state_bytes = 0  # of a token's hidden state; known after ``require_chain``
        self._kinds = [type(part) for part in self.parts]
        self._noted: list[tuple[int, mx.array, Call]] | None = None
        self._output: mx.array | None = None
        for number, part in enumerate(self.parts):
            give(part, {"__call__": self._stub(number)})

    def compute(self, number: int, state: mx.array, call: Call) -> mx.array:
        """The output of a block, as a lazy array."""
        output: mx.array = self._kinds[number].__call__(self.parts[number], state, *call[0], **call[1])
        return output

    @contextmanager
    def at_hand(self, number: int, following: int | None = None) -> Iterator[None]:
        """Hold a block's weights in memory inside this context, and meanwhile read those of the ``following`` block."""
        self.pulse()
        with self.reading():
            mx.eval(self._arrays(number))
            if following in self._owners:
                mx.async_eval(self._arrays(following))
            yield
        self.drop(number)

    def drop(self, number: int) -> None:
        """Free a block's weights; the next use reads them again. Raises ModelError if the files have changed."""
        if number not in self._unread:
            self._unread = {
                place: {name: _own_arrays(part) for name, part in parts}
                for place, parts in self._by_block(self._opened()).items()
            }
        fresh = self._unread.pop(number)
        for name, part in self._owners[number]:
            for key, array in fresh[name].items():
                part[key] = array

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn mlx's error for a file that cannot be read into ModelError."""
        try:
            yield
        except RuntimeError as error:
            if not any(words in str(error) for words in CANNOT_READ):
                raise
            self.require_unchanged()
            what, do = f"The base model cannot be read from disk: {error}", f"check this disk; {AS_IT_WAS}"
            raise ModelError(what, where=self._folder, do=do) from error

    def require_unchanged(self) -> None:
        """Raise ModelError if a weight file is no longer the one that the run began with."""
        now = _stamps(self._folder)
        if changed := sorted({name for name, _ in self._stamps.items() ^ now.items()}):
            what = f"The base model's files changed while it was in use: {', '.join(changed)}."
            raise ModelError(what, where=self._folder, do=AS_IT_WAS)

    def noted(self, run: Callable[[], Any]) -> tuple[mx.array, list[Call]]:
        """Return the input of the first block in ``run``, a pass through the model, and each block's other arguments.

        Nothing is computed. Raises Refusal unless the blocks are called once each, in order.
        """
        self._noted = found = list[tuple[int, mx.array, Call]]()
        try:
            run()
        finally:
            self._noted = None
        if [number for number, _, _ in found] != list(range(len(found))) or not found:
            raise Refusal("its blocks are not called one after the other")
        return found[0][1], [call for _, _, call in found]

    @contextmanager
    def after(self, output: mx.array) -> Iterator[None]:
        """Let a pass through the model start after its last block, with that block's ``output``."""
        self._output = output
        try:
            yield
        finally:
            self._output = None

    def require_chain(self, call: Callable[..., mx.array], *, packed: bool) -> None:
        """Raise ModelError unless blocks called one by one give the results of ``call``: the model or its trunk."""

        def run() -> mx.array:
            ids = mx.arange(1, PROBE_TOKENS + 1)
            if not packed:
                return call(ids[None])
            block = Block(0, PROBE_TOKENS, 1, PROBE_TOKENS)
            return call_packed(call, len(self.module.layers), ids, PackedRows(mx.arange(PROBE_TOKENS), (block,)))

        def ask() -> None:
            expected = asked(run)
            with refusals():
                state, calls = self.noted(run)
                self.state_bytes = state.shape[-1] * state.itemsize
                for number, each in enumerate(calls):
                    with self.at_hand(number):
                        state = self.compute(number, state, each)
                        mx.eval(state)
                with self.after(state):
                    found = asked(run)
            if not mx.array_equal(found, expected, equal_nan=True).item():
                raise Refusal("its blocks depend on more than the output of the block before")

        try:
            through_few_blocks(self.module, ask)
        except Refusal as refusal:
            raise self._refused(str(refusal)) from refusal
        self.drop(OUTSIDE)

    def _stub(self, number: int) -> Callable[..., Any]:
        def call(_part: Any, state: mx.array, *arguments: Any, **keywords: Any) -> Any:
            if self._output is not None:
                return self._output
            if self._noted is not None:
                self._noted.append((number, state, (arguments, keywords)))
                return state
            with self.at_hand(number):
                output = self.compute(number, state, (arguments, keywords))
                mx.eval(output)
            return output

        return call

    def _opened(self) -> Any:
        """Open the model again, on the reading stream; this leaves the run's random state unchanged."""
        self.require_unchanged()
        state: Any = mx.random.state
        high, low = np.array(state[0]).tolist()
        with self.reading(), mx.stream(self._stream):
            module = self._open()
        mx.random.seed(high << 32 | low)
        return module

    def _arrays(self, number: int | None) -> list[mx.array]:
        return [array for _, part in self._owners[number or 0] for array in _own_arrays(part).values()]

    def _by_block(self, module: Any) -> dict[int, list[tuple[str, Any]]]:
        """Parts with weights and their names, by block number; OUTSIDE: parts outside of blocks."""
        number_of: dict[int, int] = {}
        for number, block in enumerate(module.layers):
            for _, part in block.named_modules():
                if number_of.setdefault(id(part), number) != number and _own_arrays(part):
                    raise self._refused("its blocks share weights")
        parts: dict[int, list[tuple[str, Any]]] = {number: [] for number in (OUTSIDE, *range(len(module.layers)))}
        for name, part in module.named_modules():
            if _own_arrays(part):
                parts[number_of.get(id(part), OUTSIDE)].append((name, part))
        return parts

    def _refused(self, why: str) -> ModelError:
        do = "set train.stream_base=false; if memory is then too small, use a smaller or more strongly quantized model"
        return ModelError(f"This model cannot be trained with its base on disk: {why}.", where=self._folder, do=do)


def _stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and time of the last change of each weight file."""
    facts = ((path.name, path.stat()) for path in folder.glob("*.safetensors"))
    return {name: (fact.st_ino, fact.st_size, fact.st_mtime_ns) for name, fact in facts}


def _own_arrays(part: Any) -> dict[str, mx.array]:
    """A part's parameters, without those of the parts inside it."""
    return {key: value for key, value in part.items() if isinstance(value, mx.array) and not key.startswith("_")}


@dataclass(frozen=True)
class BaseModel:
    """A model ready for use, and how this engine runs it. A refusal is empty if the model supports the feature."""

    module: Any  # an mlx_lm model: called with (rows, tokens) ids, returns (rows, tokens, vocabulary) logits
    eos_ids: frozenset[int]  # tokens that end its answers
    packing_refusal: str  # why rows of different lengths cannot be packed into one list of tokens
    split: SplitModel | None  # None if refused: logits are computed for all tokens
    randomness: Randomness = field(default_factory=Randomness)
    blocks: Blocks | None = None  # None if the base is in memory

    @property
    def packs_rows(self) -> bool:
        """Whether rows are packed into one list of tokens; else they are padded to rectangles, as always on a GPU."""
        return device().on_cpu and not self.packing_refusal

    @property
    def trunk(self) -> Any:
        """The part of the model that computes the head's input; the whole model if it is not split."""
        return self.module if self.split is None else self.split.trunk

    def head(self) -> Head:
        """The function from hidden states to logits, for one pass; the identity if the model is not split."""
        return (lambda states: states) if self.split is None else self.split.head()

    def head_alone(self) -> "BaseModel":
        """This model reduced to its head, so that all other weights can be freed."""
        split = None if self.split is None else dataclasses.replace(self.split, trunk=self.split.project)
        return dataclasses.replace(self, module=None, split=split, blocks=None)

    @contextmanager
    def answering(self, rows: int) -> Iterator[None]:
        """Generate ``rows`` answers at a time with all threads of a CPU; with one if its products are small.

        The threads of a product wait for each other: for milliseconds if another program is busy.
        """
        parts = (part for block in self.module.layers for _, part in block.named_modules() if "weight" in part)
        sizes = [len(part.weight) * inputs_of(part) for part in parts if part.weight.ndim == 2]
        is_large = max(rows, ROWS_AS_SLOW) * sum(sizes) > LEAST_SHARED * len(sizes)
        with blas_threads(1 if is_large else cores()):
            try:
                yield
            finally:
                wait_for_the_next_token()  # with another number of threads, OpenBLAS frees what it computes with

    @functools.cached_property
    def trained(self) -> Trained:
        """The trained arrays; use it after they have been made trainable."""
        return Trained(self.module)

    @functools.cached_property
    def continues_padded(self) -> bool:
        """Whether a padded batch of prompts gives the same answers as single prompts; tried once on a few tokens."""
        return not padding_refusal(self.module)


def open_base(folder: Path, *, dequantize: bool, compute_dtype: str | None = None, stream: bool = False) -> BaseModel:
    """Load the model in ``folder``; raises ModelError when mlx-lm cannot.

    A GPU computes in ``compute_dtype``; None: the type in which the model is stored.

    With ``dequantize`` quantized weights are dequantized once; without it, a CPU dequantizes them at each use. On CPU
    dequantized weights are float32, because only float32 products use the BLAS (measured: 16-bit products run at 6
    GFLOP/s).

    With ``stream`` the weights stay on disk, and each block is read when it is computed.
    """
    with errors_told("load the model", folder):
        module, config = load(folder)
        require_own_head(module, config, folder)
        ids = config.get("eos_token_id")  # those of generation_config.json, if it has any
        eos_ids = frozenset(ids if isinstance(ids, list) else [ids] if ids is not None else [])
        if not stream:
            module = ready_to_compute(module, dequantize=dequantize, compute_dtype=compute_dtype)
            return BaseModel(module, eos_ids, *adapt(module))

        def open_lazily() -> Any:
            return ready_to_compute(load(folder)[0], dequantize=dequantize, compute_dtype=compute_dtype, read=False)

        blocks = Blocks(folder, open_lazily)
        model = BaseModel(blocks.module, eos_ids, *adapt(blocks.module), blocks=blocks)
        blocks.require_chain(model.trunk, packed=model.packs_rows)
        return model


def dequantize_to_answer(files: ModelFiles) -> bool:
    """Whether to dequantize a quantized base for generation: on CPU, if a quarter of available memory is enough."""
    return device().on_cpu and 4 * files.parameters <= psutil.virtual_memory().available // 4

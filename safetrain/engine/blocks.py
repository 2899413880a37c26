"""A model's blocks, called one at a time with their weights read from disk, whatever the model's own code does.

The model's own loop runs with stubs in place of its blocks: first stubs that note their arguments, then, when the
blocks have been computed one by one, stubs that return the last one's output. So no model's code is copied. Whether
that gives the model's own numbers is found by comparing both on a few tokens.

Outside of that a block that is called reads its weights, computes, and drops them: answers and tests need no more.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from safetrain.core.errors import ModelError
from safetrain.engine.frozen_store import OUTSIDE, FrozenStore
from safetrain.engine.layers import give
from safetrain.engine.row_attention import Block, PackedRows
from safetrain.engine.upstream.adaptation import Refusal, asked, call_packed, refusals, through_few_blocks

PROBE_TOKENS = 8


@dataclass(frozen=True)
class Call:
    """A block's arguments after the hidden states: mask, cache, positions."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class Blocks:
    """The blocks of a base that stays on disk."""

    def __init__(self, folder: Path, open_lazily: Callable[[], Any]) -> None:
        try:
            self.store = FrozenStore(folder, open_lazily)
        except Refusal as refusal:
            raise not_streamed(str(refusal), str(folder)) from refusal
        self._folder = folder
        self.module = self.store.module
        self.parts: list[Any] = list(self.module.layers)
        self.pulse: Callable[[], None] = lambda: None  # called before each block
        self.given: dict[int, mx.array] = {}  # outputs of the last block, by the id of their shard
        self.state_bytes = 0  # of a token's hidden state; known after ``require_chain``
        self._kinds = [type(part) for part in self.parts]
        self._noted: list[tuple[int, mx.array, Call]] | None = None
        self._output: mx.array | None = None
        for number, part in enumerate(self.parts):
            give(part, {"__call__": self._stub(number)})

    def __len__(self) -> int:
        return len(self.parts)

    def _stub(self, number: int) -> Callable[..., Any]:
        def call(_part: Any, state: mx.array, *arguments: Any, **keywords: Any) -> Any:
            if self._output is not None:
                return self._output
            if self._noted is not None:
                self._noted.append((number, state, Call(arguments, keywords)))
                return state
            with self.at_hand(number):
                output = self.compute(number, state, Call(arguments, keywords))
                mx.eval(output)
            return output

        return call

    @contextmanager
    def at_hand(self, number: int, following: int | None = None) -> Iterator[None]:
        """Have a block's weights in memory inside this context, and read those of the ``following`` one meanwhile."""
        self.pulse()
        self.store.read(number)
        if following is not None:
            self.store.read_ahead(following)
        yield
        self.store.drop(number)

    def compute(self, number: int, state: mx.array, call: Call) -> mx.array:
        """The output of a block, as a lazy array."""
        output: mx.array = self._kinds[number].__call__(self.parts[number], state, *call.arguments, **call.keywords)
        return output

    def noted(self, run: Callable[[], Any]) -> tuple[mx.array, list[Call]]:
        """What ``run``, a pass through the model, gives to its first block, and the other arguments of each block.

        Nothing is computed. Raises Refusal unless the blocks are called once each, in their order.
        """
        found = list[tuple[int, mx.array, Call]]()
        self._noted = found
        try:
            run()
        finally:
            self._noted = None
        if [number for number, _, _ in found] != list(range(len(found))) or not found:
            raise Refusal("its blocks are not called one after the other")
        return found[0][1], [call for _, _, call in found]

    @contextmanager
    def after(self, output: mx.array) -> Iterator[None]:
        """Let a pass through the model begin after its last block, with this ``output``."""
        self._output = output
        try:
            yield
        finally:
            self._output = None

    def require_chain(self, call: Callable[..., mx.array], *, packed: bool) -> None:
        """Raise ModelError unless blocks called one by one give the numbers of ``call``, the model or its trunk."""

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
                raise Refusal("its blocks depend on more than the output of the one before")

        try:
            through_few_blocks(self.module, ask)
        except Refusal as refusal:
            raise not_streamed(str(refusal), str(self._folder)) from refusal
        self.store.drop(OUTSIDE)


def not_streamed(why: str, where: str) -> ModelError:
    """The error for a model whose base cannot stay on disk."""
    return ModelError(
        f"This model cannot be trained with its base on disk: {why}.",
        where=where,
        do="set train.stream_base=false; if it does not fit then, take a smaller or more strongly quantized model",
    )

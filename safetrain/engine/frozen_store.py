"""Frozen weights that stay on disk: read when they are needed, dropped after their use.

mlx reads a lazy array from its file when a computation needs it, and then keeps it for the module that holds it. So
after each use the module gets lazy arrays again. They come from the model opened anew, which costs no reading, and are
therefore exactly those of a model in memory: renamed, stacked and cast by the same code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from safetrain.core.errors import ModelError
from safetrain.engine.upstream.adaptation import Refusal

OUTSIDE = -1  # the number of all weights outside of blocks: embedding, head, norms
CANNOT_READ = ("[read]", "[load", "Unable to read", "Failed to open")  # in mlx's messages
THE_SAME_COMMAND = "put the model back as it was, then run the same command: it continues from the last checkpoint"


class FrozenStore:
    """The weights of a model whose arrays are lazy, by the number of their block."""

    def __init__(self, folder: Path, open_lazily: Callable[[], Any]) -> None:
        """``open_lazily`` returns a new module of the model in ``folder``, of which no weight has been read."""
        self._folder, self._open = folder, open_lazily
        self._stream = mx.new_stream(mx.cpu)  # reads ahead while the device computes
        self._stamps = stamps_of(folder)
        self.module = self._opened()
        self._owners = _by_block(self.module)  # a layer keeps its object when an adapter wraps it
        self._unread: dict[int, dict[str, dict[str, mx.array]]] = {}

    def read_ahead(self, number: int) -> None:
        """Start to read a block's weights."""
        if number in self._owners:
            mx.async_eval(self._arrays(number))

    def read(self, number: int) -> None:
        """Read a block's weights; raises ModelError if the disk does not give them."""
        with self.reading():
            mx.eval(self._arrays(number))

    def drop(self, number: int) -> None:
        """Free a block's weights; the next use reads them again. Raises ModelError if the files have changed."""
        if number not in self._unread:
            self._unread = {
                place: {name: _arrays_of(part) for name, part in parts}
                for place, parts in _by_block(self._opened()).items()
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
            raise ModelError(
                f"The base model cannot be read from disk: {error}",
                where=str(self._folder),
                do=f"check this disk and its connection; {THE_SAME_COMMAND}",
            ) from error

    def require_unchanged(self) -> None:
        """Raise ModelError if a weight file is no longer the one that the run began with."""
        now = stamps_of(self._folder)
        changed = sorted(name for name in self._stamps.keys() | now if self._stamps.get(name) != now.get(name))
        if changed:
            raise ModelError(
                f"The base model's files changed while it was in use: {', '.join(changed)}.",
                where=str(self._folder),
                do=THE_SAME_COMMAND,
            )

    def _opened(self) -> Any:
        """The model opened anew on the stream that reads. The random numbers of the run stay as they are."""
        self.require_unchanged()
        state: Any = mx.random.state
        high, low = np.array(state[0]).tolist()
        try:
            with self.reading(), mx.stream(self._stream):
                return self._open()
        finally:
            mx.random.seed(high << 32 | low)  # building a module draws

    def _arrays(self, number: int) -> list[mx.array]:
        return [array for _, part in self._owners[number] for array in _arrays_of(part).values()]


def stamps_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    """What tells whether a weight file is still the same: inode, size and time of its last change."""
    facts = ((path.name, path.stat()) for path in folder.glob("*.safetensors"))
    return {name: (fact.st_ino, fact.st_size, fact.st_mtime_ns) for name, fact in facts}


def _by_block(module: Any) -> dict[int, list[tuple[str, Any]]]:
    """The parts of each block with their names, and those outside; raises Refusal if two blocks share a part."""
    number_of: dict[int, int] = {}
    for number, block in enumerate(module.layers):
        for _, part in block.named_modules():
            if number_of.setdefault(id(part), number) != number and _arrays_of(part):
                raise Refusal("its blocks share weights")
    parts: dict[int, list[tuple[str, Any]]] = {number: [] for number in (OUTSIDE, *range(len(module.layers)))}
    for name, part in module.named_modules():
        if _arrays_of(part):
            parts[number_of.get(id(part), OUTSIDE)].append((name, part))
    return parts


def _arrays_of(part: Any) -> dict[str, mx.array]:
    """A part's own parameters, without those of the parts inside it."""
    return {key: value for key, value in part.items() if isinstance(value, mx.array) and not key.startswith("_")}

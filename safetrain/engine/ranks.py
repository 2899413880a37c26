"""Several processes (ranks) of one training run, and their communication.

Each rank computes the gradient of its share of an update's rows (engine/batches.py); the sum over all is the gradient
of the update, and every rank applies it to its own weights. Decisions depend only on numbers that all ranks share, so
all decide alike. Only rank 0 reads and writes the run's files.

mlx's ring adds each piece of a message on one rank and sends the sum around, so all ranks have the same bits
(mlx/distributed/ring/ring.cpp, ``all_reduce_impl``).
"""

import dataclasses
import faulthandler
import hashlib
import importlib.metadata
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from safetrain.core.data.training_rows import Cursor
from safetrain.core.errors import ConfigError, EngineError
from safetrain.core.formatting import counted
from safetrain.core.recorder import Phase, Recorder, Work
from safetrain.core.records.run_state import RunIdentity
from safetrain.engine.adapters import adapter_weights, set_adapter_weights
from safetrain.engine.backend import device
from safetrain.engine.model import BaseModel
from safetrain.engine.optimizer import BlockOptimizer
from safetrain.engine.state import TrainState
from safetrain.engine.update import Gradient

MESSAGE_BYTES = 64 * 2**20  # larger data is split
FACTS_BYTES = 2048  # of what ranks compare, as JSON
SAME_COMMAND = "the same command continues from the last checkpoint"
HOSTFILE = "MLX_HOSTFILE"
PACKAGES = ("safetrain", "mlx", "mlx-lm", "numpy")
JOIN_SECONDS = 90.0  # the other ranks have stopped trying to connect by then


class Ranks:
    """One process of a training run. A single process exchanges nothing."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: mx.distributed.Group | None = None, recorder: Recorder | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self.stop = 0  # the stop signal that any rank has received, as of the last ``total``; 0: none
        self._group, self.recorder = group, recorder

    @property
    def together(self) -> bool:
        """Whether there are other ranks."""
        return self.size > 1

    @property
    def writes(self) -> bool:
        """Whether this rank reads and writes the run's files."""
        return self.rank == 0

    def gather(self, content: bytes, step: int = 0) -> list[bytes]:
        """Collect one message from each rank; all must have the same length."""
        with self._exchange(step):
            rows = mx.distributed.all_gather(mx.array(np.frombuffer(content, np.uint8))[None], group=self._group)
            mx.eval(rows)
        return [row.tobytes() for row in np.array(rows)]

    def total(self, stop: int, step: int, *values: float) -> list[float]:
        """Sum each value over all ranks, in float64 and rank order: the same bits on all. Agrees on ``stop``."""
        contents = self.gather(np.array([stop, *values], dtype=np.float64).tobytes(), step)
        stops, *columns = zip(*(np.frombuffer(each, dtype=np.float64).tolist() for each in contents), strict=True)
        self.stop = int(max(stops))
        return [sum(column) for column in columns]

    def sum_gradient(self, gradient: Gradient, step: int) -> Gradient:
        """Sum gradients over all ranks, with the same bits on each; small arrays share a message."""
        with self._exchange(step):
            wide = tree_map(lambda array: array.astype(mx.float32), gradient)
            sums = tree_map(lambda array: array * self.size, nn.average_gradients(wide, self._group, MESSAGE_BYTES))
            mx.eval(sums)
        return dict(tree_flatten(sums))

    def broadcast(self, content: bytes) -> bytes:
        """Send bytes from rank 0 to all ranks."""
        length = int.from_bytes(self.gather(len(content).to_bytes(8, "little"))[0], "little")
        mine = content if self.rank == 0 else bytes(length)
        return np.array(self._sum(mx.array(np.frombuffer(mine, dtype=np.uint8)))).tobytes()

    def broadcast_arrays(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Copy rank 0's arrays to all ranks, bit for bit; names and shapes must be the same on all."""
        copies = {}
        for name, array in sorted(arrays.items()):
            own = array if self.rank == 0 else mx.zeros_like(array)
            numbers = self._sum(own.reshape(-1).view(mx.uint8))  # not numbers: 0 + -0.0 is 0.0
            copies[name] = numbers.view(array.dtype).reshape(array.shape)
        return copies

    def require_same(self, facts: Mapping[str, str]) -> None:
        """Raise ConfigError on all ranks if one differs from rank 0 in a fact that would change the training."""
        own = json.dumps([socket.gethostname(), *facts.values()]).encode()
        (first_host, *first), *others = (json.loads(each) for each in self.gather(own.ljust(FACTS_BYTES)))
        for rank, (host, *theirs) in enumerate(others, 1):
            each = zip(facts, theirs, first, strict=True)
            if differs := [f"{name} ({its}, rank 0: {fact})" for name, its, fact in each if its != fact]:
                raise ConfigError(
                    f"Rank {rank} on {host} would train differently from rank 0 on {first_host}.",
                    expected=f"the same {', '.join(facts)} on {counted(self.size, 'rank')}",
                    got="; ".join(differs),
                    do="make project, packages, model and data/validated on that machine equal to those of rank 0",
                )

    def _sum(self, array: mx.array) -> mx.array:
        with self._exchange(0):
            total = mx.distributed.all_sum(array, group=self._group)
            mx.eval(total)
        return total

    @contextmanager
    def _exchange(self, step: int) -> Iterator[None]:
        """Wrap every exchange. Raises EngineError when a rank is gone; no further exchange is possible then."""
        try:
            with _noted(self.recorder, step):
                yield
        except RuntimeError as error:
            who = f"Rank {1 - self.rank}" if self.size == 2 else "Another rank"
            raise EngineError(
                f"{who} is gone: the ranks cannot exchange numbers any more ({error}).",
                where=f"rank {self.rank} of {self.size}, at step {step}",
                do=f"read the other rank's output; {SAME_COMMAND}",
            ) from error


ALONE = Ranks()


def _noted(recorder: Recorder | None, step: int = 0) -> AbstractContextManager[None]:
    return nullcontext() if recorder is None else recorder.phase(Phase.EXCHANGE, Work(step))


def join(backend: str | None, recorder: Recorder | None = None) -> Ranks:
    """Connect to the other ranks, which mlx.launch's environment names, and wait for them.

    ``backend`` is None on ranks without a job; the environment then decides.
    Raises EngineError if they cannot be reached: mlx's ring tries for half a minute. It then waits forever for
    others to connect, and no Python runs meanwhile, so a timer ends this process with exit code 1.
    """
    backend = backend or ("ring" if HOSTFILE in os.environ else "any")
    name = backend.removesuffix("-ring")  # mlx.launch asks for jaccl's ring in the environment
    faulthandler.dump_traceback_later(JOIN_SECONDS, exit=True)
    try:
        with _noted(recorder):
            group = mx.distributed.init(strict=True, backend=name)
    except (RuntimeError, ValueError) as error:
        raise EngineError(
            f"The ranks cannot reach each other: {error}",
            where=f"backend {backend}, hostfile {os.environ.get(HOSTFILE, 'not set')}",
            do="check that every rank runs, and that the hostfile's addresses are right and reachable",
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Ranks(group.rank(), group.size(), group, recorder)


def facts_of(identity: RunIdentity) -> dict[str, str]:
    """Facts that must be equal on all ranks, by name."""
    texts = dataclasses.asdict(identity).items()
    digests = {name.replace("_", " "): hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in texts}
    return {**digests, "kind of device": device().name}


def versions() -> dict[str, str]:
    """Versions of the packages that affect results or the job's format."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def hand_out(ranks: Ranks, state: TrainState, model: BaseModel, optimizer: BlockOptimizer) -> TrainState:
    """Copy rank 0's weights, optimizer state and position to all ranks; records stay on rank 0."""
    bare = dataclasses.asdict(dataclasses.replace(state, records=[])) if ranks.writes else {}
    value = json.loads(ranks.broadcast(json.dumps(bare).encode()))
    weights = ranks.broadcast_arrays(adapter_weights(model))
    moments = ranks.broadcast_arrays(dict(tree_flatten(optimizer.state)))
    if ranks.writes:
        return state
    set_adapter_weights(model, weights)
    optimizer.state = tree_unflatten(list(moments.items()))
    mx.eval(model.module.trainable_parameters(), optimizer.state)
    return TrainState(**{**value, "cursor": Cursor(**value["cursor"])})


def require_same_weights(ranks: Ranks, model: BaseModel, step: int) -> None:
    """Raise EngineError on all ranks if one rank's trained weights differ from rank 0's."""
    digest = hashlib.sha256()
    for name, array in sorted(adapter_weights(model).items()):
        digest.update(name.encode())
        digest.update(np.array(array.reshape(-1).view(mx.uint8)).data)
    digests = ranks.gather(digest.digest(), step)
    drifted = [str(rank) for rank, other in enumerate(digests) if other != digests[0]]
    if drifted:
        raise EngineError(
            f"After step {step} the weights of rank {', '.join(drifted)} are no longer those of rank 0.",
            do=f"{SAME_COMMAND}; if it happens again, use machines of one kind, or fewer ranks",
        )

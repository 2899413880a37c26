"""Several processes that make one training together, and what they tell each other.

Each computes the gradient of its share of an update's rows (engine/batches.py); the sum over all is the gradient of
the update, and every rank applies it to its own weights. Decisions depend only on numbers that all ranks
share, so all decide the same. Only rank 0 reads and writes the run's files.

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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from safetrain.core.data.row_order import Cursor
from safetrain.core.errors import ConfigError, EngineError
from safetrain.core.formatting import counted
from safetrain.core.recorder import Phase, Recorder, Work
from safetrain.core.records.run_state import RunIdentity
from safetrain.engine.adapters import adapter_weights, set_adapter_weights
from safetrain.engine.backend import device
from safetrain.engine.model import BaseModel
from safetrain.engine.optimizer import BlockOptimizer
from safetrain.engine.state import TrainState

Gradient = Any  # a tree of arrays, shaped as the trainable parameters
MESSAGE_BYTES = 64 * 2**20  # more than that is sent in several
WORDS = np.uint32
FACT_BYTES = 80  # of a fact that ranks compare: a digest, a version, the name of a host
SAME_COMMAND = "the same command continues from the last checkpoint"
HOSTFILE = "MLX_HOSTFILE"
OF_MEMORY = ("alloc", "memory")  # in mlx's messages
PACKAGES = ("safetrain", "mlx", "mlx-lm", "numpy")
DIGEST_BYTES = 16  # of weights that ranks compare
JOIN_SECONDS = 90.0  # the other ranks have stopped trying to connect by then


@dataclass(frozen=True)
class Contribution:
    """What a rank says of its part of an update."""

    loss: float  # nats, summed over its labels
    stop: int  # the signal that wants this rank to end, 0 for none
    tokens: int  # computed, padding included


class Ranks:
    """One process among those of a training. A single process exchanges nothing."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: mx.distributed.Group | None = None, recorder: Recorder | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self.stop = 0  # the signal that wants one of the ranks to end, as of the last exchange that said so
        self._group, self.recorder = group, recorder
        self.hosts = (socket.gethostname(),) * size if size > 1 else ("",)

    @property
    def together(self) -> bool:
        """Whether there are other ranks."""
        return self.size > 1

    @property
    def writes(self) -> bool:
        """Whether the run's files are this rank's business."""
        return self.rank == 0

    def gather(self, content: bytes, step: int = 0) -> list[bytes]:
        """What each rank gives; of the same length on all."""
        words = np.frombuffer(content.ljust(-(-len(content) // 4) * 4, b"\0"), dtype=WORDS)
        with self._exchange(step):
            rows = mx.distributed.all_gather(mx.array(words)[None], group=self._group)
            mx.eval(rows)
        return [row.tobytes()[: len(content)] for row in np.array(rows)]

    def total(self, value: float, stop: int, step: int) -> float:
        """The sum over all ranks in float64, added in their order: the same bits on all. Agrees on ``stop``."""
        contents = self.gather(np.array([value, stop], dtype=np.float64).tobytes(), step)
        pairs = np.array([np.frombuffer(each, dtype=np.float64) for each in contents])  # (ranks, 2)
        self.stop = int(pairs[:, 1].max())
        return float(sum(pairs[:, 0].tolist()))

    def sum_update(self, own_part: Contribution, gradient: Gradient, step: int) -> tuple[Gradient, list[Contribution]]:
        """The gradient summed over all ranks, the same bits on each, and what every rank says. Agrees on ``stop``.

        In few messages: for small arrays it is their number that costs time. The message goes with the first one, in
        a row that no other rank writes to, so adding changes nothing in it.
        """
        own = np.zeros((self.size, len(dataclasses.fields(Contribution))), dtype=np.float32)
        own[self.rank] = dataclasses.astuple(own_part)
        arrays, tree = {"": mx.array(own)}, tree_flatten(gradient)
        arrays |= {name: array.astype(mx.float32) for name, array in tree}
        sums = self._summed(arrays, step)
        contributions = [Contribution(float(a), int(b), int(c)) for a, b, c in np.array(sums.pop("")).tolist()]
        self.stop = max(each.stop for each in contributions)
        return tree_unflatten([(name, sums[name]) for name, _ in tree]), contributions

    def broadcast(self, content: bytes) -> bytes:
        """What rank 0 gives, on all ranks."""
        length = int.from_bytes(self.gather(len(content).to_bytes(8, "little"))[0], "little")
        mine = content if self.rank == 0 else bytes(length)
        sums = self._summed({"": mx.array(np.frombuffer(mine, dtype=np.uint8))}, 0)
        return np.array(sums[""]).tobytes()

    def broadcast_arrays(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Copy rank 0's arrays to all ranks, bit for bit."""
        kinds = [(name, str(array.dtype).rpartition(".")[2], list(array.shape)) for name, array in arrays.items()]
        kinds = json.loads(self.broadcast(json.dumps(kinds if self.rank == 0 else []).encode()))
        numbers = {}
        for name, kind, shape in kinds:  # as bytes: adding zero to a number may change it, as it does -0.0
            array = arrays[name] if self.rank == 0 else mx.zeros(shape, getattr(mx, kind))
            numbers[name] = array.reshape(-1).view(mx.uint8)
        sums = self._summed(numbers, 0)
        return {name: sums[name].view(getattr(mx, kind)).reshape(shape) for name, kind, shape in kinds}

    def require_same(self, facts: Mapping[str, str]) -> None:
        """Raise ConfigError, on all ranks, where one differs from rank 0 in what would make it another training."""
        texts = [socket.gethostname(), *facts.values()]
        contents = self.gather(b"".join(text.encode()[:FACT_BYTES].ljust(FACT_BYTES, b"\0") for text in texts))
        answers = [
            [each[start : start + FACT_BYTES].rstrip(b"\0").decode(errors="replace") for start in _starts(each)]
            for each in contents
        ]
        self.hosts = tuple(each[0] for each in answers)
        for rank, (host, *own) in enumerate(answers):
            pairs = zip(facts, own, answers[0][1:], strict=True)
            differs = [_difference(name, mine, first) for name, mine, first in pairs if mine != first]
            if differs:
                raise ConfigError(
                    f"Rank {rank} on {host} would train something else than rank 0 on {self.hosts[0]}.",
                    expected=f"the same {', '.join(facts)} on {counted(self.size, 'rank')}",
                    got="; ".join(differs),
                    do="make that machine's project, packages, model and data/validated like the first one's",
                )

    def _summed(self, arrays: Mapping[str, mx.array], step: int) -> dict[str, mx.array]:
        """Each array's sum over all ranks. Arrays of one type, the same names and shapes on all ranks."""
        sums = {}
        for names in _messages(arrays):
            flat = mx.concatenate([arrays[name].reshape(-1) for name in names])
            mx.eval(flat)
            with self._exchange(step):
                total = mx.distributed.all_sum(flat, group=self._group)
                mx.eval(total)
            ends = np.cumsum([arrays[name].size for name in names]).tolist()
            for name, start, end in zip(names, [0, *ends], ends, strict=False):
                sums[name] = total[start:end].reshape(arrays[name].shape)
        return sums

    @contextmanager
    def _exchange(self, step: int) -> Iterator[None]:
        """Around what waits for other ranks. Raises EngineError when one is gone; nothing can be exchanged after it."""
        recorder = self.recorder
        try:
            if recorder is None:
                yield
            else:
                with recorder.phase(Phase.EXCHANGE, Work(step)):
                    yield
        except RuntimeError as error:
            if any(word in str(error).lower() for word in OF_MEMORY):  # not another rank's fault
                raise
            who = f"Rank {1 - self.rank}" if self.size == 2 else "Another rank"
            raise EngineError(
                f"{who} is gone: the ranks cannot exchange numbers any more ({error}).",
                where=f"rank {self.rank} of {self.size}, at step {step}",
                do=f"look at what the other said; {SAME_COMMAND}",
            ) from error


ALONE = Ranks()


def join(backend: str, recorder: Recorder | None = None) -> Ranks:
    """Meet the other ranks, which mlx.launch's environment names; waits for them.

    Raises EngineError where they cannot be reached: mlx's ring tries to connect for half a minute. It waits for others
    to connect without an end, and no Python runs meanwhile, so this process is ended with exit code 1 after a while.
    """
    name = backend.removesuffix("-ring")  # of jaccl-ring mlx.launch tells mlx by the environment
    faulthandler.dump_traceback_later(JOIN_SECONDS, exit=True)
    try:
        if recorder is None:
            group = mx.distributed.init(strict=True, backend=name)
        else:
            with recorder.phase(Phase.EXCHANGE):
                group = mx.distributed.init(strict=True, backend=name)
    except (RuntimeError, ValueError) as error:
        raise EngineError(
            f"The ranks cannot reach each other: {error}",
            where=f"backend {backend}, hosts as in {os.environ.get(HOSTFILE, 'no hostfile')}",
            do="see that every rank is started, and that the machines have these addresses and can be reached",
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Ranks(group.rank(), group.size(), group, recorder)


def backend_here() -> str:
    """What the environment is set up for, for a rank that has not read the job."""
    return "ring" if HOSTFILE in os.environ else "any"


def facts_of(identity: RunIdentity) -> dict[str, str]:
    """What has to be the same on all ranks, by name."""
    return {
        "base model": _short(identity.base_model),
        "training rows": _short(identity.training_rows),
        "validation rows": _short(identity.validation_rows),
        "settings": _short(identity.settings),
        "random order of rows": _short(identity.draws),
        "kind of device": device().name,
        **versions(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers and the form of the job."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def hand_out(ranks: Ranks, state: TrainState, model: BaseModel, optimizer: BlockOptimizer) -> TrainState:
    """Weights, the optimizer's state and the position of rank 0 on all ranks; its records stay with it."""
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
    """Raise EngineError, on all ranks, where one's trained weights are not those of rank 0."""
    digest = hashlib.sha256()
    for name, array in sorted(adapter_weights(model).items()):
        digest.update(name.encode())
        digest.update(np.array(array.reshape(-1).view(mx.uint8)).data)
    digests = ranks.gather(digest.digest()[:DIGEST_BYTES], step)
    drifted = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if drifted:
        names = ", ".join(f"rank {rank} on {ranks.hosts[rank]}" for rank in drifted)
        raise EngineError(
            f"After step {step} the weights of {names} are no longer those of rank 0 on {ranks.hosts[0]}.",
            expected="the same bits on all ranks, because all apply the same gradient",
            do=f"{SAME_COMMAND}; if it happens again, use machines of one kind, or fewer ranks",
        )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _messages(arrays: Mapping[str, mx.array]) -> Iterator[list[str]]:
    """Names in their order, in groups of at most MESSAGE_BYTES, or of one."""
    group, size = list[str](), 0
    for name in sorted(arrays):
        if group and size + arrays[name].nbytes > MESSAGE_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += arrays[name].nbytes
    if group:
        yield group


def _starts(content: bytes) -> range:
    return range(0, len(content), FACT_BYTES)


def _difference(name: str, mine: str, first: str) -> str:
    """Digests say nothing to a person."""
    return f"{name} ({mine}, rank 0: {first})" if len(mine) <= 32 and len(first) <= 32 else name

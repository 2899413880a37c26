"""Evaluates forward pass, loss and backward pass one by one, so that a death in an update has a name (train.trace)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from safetrain.core.formatting import counted
from safetrain.core.recorder import Edge, Phase, Recorder, Work


class Tracer:
    """Writes a record and a line before and after each part of a gradient. The numbers are those of an untraced run:
    the same graph is evaluated, in three pieces."""

    def __init__(self, recorder: Recorder, say: Callable[[str], None]) -> None:
        self._recorder, self._say = recorder, say
        self.work = Work()

    def begin(self, work: Work) -> None:
        """Call before the graph of a part is built."""
        self.work = work
        self._write(Phase.FORWARD, Edge.BEFORE, f"{counted(work.rows, 'row')}, {counted(work.tokens, 'token')}")

    def observe(self, hidden: mx.array) -> mx.array:
        """Call with what the forward pass gives."""
        mx.eval(hidden)
        self._write(Phase.FORWARD, Edge.AFTER, f"output {tuple(hidden.shape)} {str(hidden.dtype).split('.')[-1]}")
        self._write(Phase.LOSS, Edge.BEFORE, "")
        return hidden

    def loss(self, loss: mx.array) -> mx.array:
        """Call with the loss."""
        mx.eval(loss)
        self._write(Phase.LOSS, Edge.AFTER, "")
        self._write(Phase.BACKWARD, Edge.BEFORE, "")
        return loss

    def end(self, gradient: Any) -> None:
        """Call with the gradient."""
        mx.eval(gradient)
        self._write(Phase.BACKWARD, Edge.AFTER, "")

    @contextmanager
    def optimizer(self, step: int) -> Iterator[None]:
        """Around the optimizer's work; the loop itself writes the records."""
        self.work = Work(step)
        self._tell(Phase.OPTIMIZER, Edge.BEFORE, "")
        yield
        self._tell(Phase.OPTIMIZER, Edge.AFTER, "")

    def _write(self, phase: Phase, edge: Edge, detail: str) -> None:
        self._recorder.write(phase, edge, self.work)
        self._tell(phase, edge, detail)

    def _tell(self, phase: Phase, edge: Edge, detail: str) -> None:
        memory = f"mlx {mx.get_active_memory() / 2**20:,.0f} MiB"
        when = f"trace: step {self.work.step} micro-batch {self.work.micro_batch}"
        when = when if self.work.rows else f"trace: step {self.work.step}"
        self._say(f"{when}: {edge.name.lower()} {phase.label}{': ' + detail if detail else ''} ({memory})")

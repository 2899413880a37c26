"""Runs the stages of safetrain as often as it is asked: ``python -m benchmarks.faults.server``, a JSON object a line.

One process for many runs, because starting one takes longer than what these runs compute. Every run goes through the
stage's own command, with its folder, its overrides and its exit code.
"""

import contextlib
import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from benchmarks.faults.limits import files_of_at_most

Calls = list[tuple[int, int, bool]]  # rows, tokens, and whether the call is a compilation's


def main() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def answer(folder: str, stage: str, overrides: list[str], file_limit: int | None) -> dict[str, Any]:
    """Run one stage in ``folder``; ``file_limit`` bounds every file that it writes, as a full disk would."""
    os.chdir(folder)
    sys.argv = [stage, *overrides]
    module = importlib.import_module(f"stages.{stage}")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), recorded_calls() as calls:
        before = block_call()
        try:
            with files_of_at_most(file_limit):
                module.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except Exception:  # noqa: BLE001  a stage that ends with a traceback is a result here
            traceback.print_exc()
            code = 1
        changed = block_call() is not before
    return {
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "calls": calls,
        "class_is_changed": changed,
    }


def block_call() -> object:
    """The method that every Llama block runs, as its class has it now."""
    from mlx_lm.models.llama import TransformerBlock

    return TransformerBlock.__call__


@contextlib.contextmanager
def recorded_calls() -> Iterator[Calls]:
    """What goes through a Llama in training mode, in order; a compiled step runs the model's code once a graph."""
    from mlx_lm.models.llama import LlamaModel

    original, calls = LlamaModel.__call__, []

    def recording(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            calls.append((*inputs.shape, not has_values(inputs)))
        return original(self, inputs, *args, **kwargs)

    LlamaModel.__call__ = recording
    try:
        yield calls
    finally:
        LlamaModel.__call__ = original


def has_values(array: Any) -> bool:
    """Whether an array can be computed now, which it cannot while a function is compiled."""
    import mlx.core as mx

    try:
        mx.eval(array)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()

"""``mlx.launch`` for ranks on several machines, without its busy loop, and ending with whoever started it.

Its threads wait for each rank's words together with room in the pipe to that rank, which there always is: it spins
(measured with two ranks on Linux: 0.92 of a core; as here 0.003). Nothing is ever written to a rank, so here
they wait for words alone.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from safetrain.engine.child_process import die_with_parent

Select = Callable[..., tuple[list[Any], list[Any], list[Any]]]


def main(arguments: list[str]) -> None:
    """``arguments``: the process id of whoever started it, then those of mlx.launch."""
    die_with_parent(int(arguments[0]))
    from mlx._distributed_utils import launch

    if hasattr(launch, "select"):
        launch.select = waiting_for_words(launch.select)
    sys.argv = ["mlx.launch", *arguments[1:]]
    launch.main()


def waiting_for_words(select: Select) -> Select:
    """``select`` that never waits for room to write."""

    def quiet(
        readable: Sequence[int], _writable: Sequence[int], errors: Sequence[int], seconds: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        return select(readable, [], errors, seconds)

    return quiet


if __name__ == "__main__":
    main(sys.argv[1:])

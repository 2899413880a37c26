"""What a case of the comparison is, and what its two sides report."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What one side showed: whether the fault is there, and the numbers."""

    faulty: bool
    text: str


@dataclass(frozen=True)
class Fault:
    """One fault: how it is provoked on either side.

    ``observable`` is False where this machine cannot show it; ``argument`` then says why, and what stands in for it.
    ``ours`` raises NotImplementedError as long as safetrain lacks what the case needs.
    """

    number: int
    title: str
    expected: str
    peer: Callable[[], Finding]
    ours: Callable[[], Finding]
    observable: bool = True
    argument: str = ""

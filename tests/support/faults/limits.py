"""A disk that is full too early."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_of_at_most(size_bytes: int | None) -> Iterator[None]:
    """Every write beyond ``size_bytes`` of a file fails, in this process and for the length of the block."""
    if size_bytes is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

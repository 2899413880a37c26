"""Sets up a supervised process: it dies with its parent, has a memory limit, and is the OOM killer's first choice.

``python -m safetrain.engine.child_process PARENT ARGUMENTS`` runs mlx.launch, and ends when process PARENT does.
"""

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from safetrain.core.storage.paths import STACKS

PR_SET_PDEATHSIG = 1
OOM_SCORE = 500  # of 1000: the kernel then ends the training and not the supervisor, the shell or the desktop
POLL_SECONDS = 0.5
GRACE_SECONDS = 4.0
THREAD_STACK_BYTES = 2 * 2**20
PTHREAD_ATTRIBUTES_BYTES = 64  # of glibc on aarch64, and 56 on x86-64


def set_up_child(parent: int, flight: Path, memory_limit_bytes: int | None) -> None:
    """Set up a supervised process. SIGUSR1 writes the stacks of its threads to ``flight``."""
    die_with_parent(parent)
    prefer_for_oom_kill()
    stacks = (flight / STACKS).open("w", encoding="utf-8")
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    limit_memory(memory_limit_bytes)


def die_with_parent(parent: int) -> None:
    """Kill this process when ``parent`` ends for any reason. Its last checkpoint stays complete."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent has already ended
        os.kill(os.getpid(), signal.SIGKILL)


def limit_memory(limit_bytes: int | None) -> None:
    """Cap private writable memory, on Linux only. An allocation beyond the cap fails, on CPU with a segfault."""
    if limit_bytes is not None and sys.platform == "linux":
        _small_stacks()
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = limit_bytes if soft == resource.RLIM_INFINITY else min(limit_bytes, soft)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _small_stacks() -> None:
    """Give new threads small stacks: the limit counts the usual 8 MiB of each, of which almost nothing is used."""
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(PTHREAD_ATTRIBUTES_BYTES)
    set_default = getattr(libc, "pthread_setattr_default_np", None)
    if set_default is not None:  # not on musl
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(THREAD_STACK_BYTES))
        set_default(attributes)


def prefer_for_oom_kill() -> None:
    """Make this process the OOM killer's first choice when the machine runs out of memory."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # not Linux, or a container that forbids it
        if int(path.read_text()) < OOM_SCORE:
            path.write_text(str(OOM_SCORE))


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)  # first, because a killed process may leak wired GPU memory (omlx#2184)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Run mlx.launch; ``arguments``: the id of the process that started this one, then mlx.launch's arguments."""
    die_with_parent(int(arguments[0]))
    from mlx._distributed_utils import launch

    sys.argv = ["mlx.launch", *arguments[1:]]
    launch.main()


if __name__ == "__main__":
    main(sys.argv[1:])

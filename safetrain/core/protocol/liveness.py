"""Whether the processes of a run live, for whoever looks on: asked of the system, by what the run has written down."""

import psutil

from safetrain.core.protocol.flight import boot_id
from safetrain.core.protocol.marker import RunMarker

LATE_SECONDS = 3600.0  # by which a clock may have been set since: a process's start is told by the clock of now


def supervisor_of(marker: RunMarker | None) -> psutil.Process | None:
    """The supervisor that has written ``marker``; None where it is gone, or ran before a reboot."""
    if marker is None or marker.boot_id != boot_id():
        return None
    return living_process(marker.supervisor_pid, marker.started_seconds)


def living_process(pid: int, started_seconds: float) -> psutil.Process | None:
    """The process of this id, if it lives and is the one that had started by then."""
    if pid <= 0:
        return None
    try:
        process = psutil.Process(pid)
        lives = process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= started_seconds + LATE_SECONDS
    except psutil.Error:  # gone; or of another user, somebody's training
        return None
    return process if lives else None

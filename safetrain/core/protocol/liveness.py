"""Whether the processes of a run live, for whoever looks on: asked of the system, by what the run has written down."""

from pathlib import Path

import psutil

from safetrain.core.protocol.flight import boot_id, read_flight
from safetrain.core.protocol.marker import RunMarker, read_marker
from safetrain.core.storage.run_files import MARKER, RECORDER

GONE_LOOKS = 2  # in a row without a training before it has ended
LATE_SECONDS = 3600.0  # by which a clock may have been set since: a process's start is told by the clock of now


def supervisor_of(marker: RunMarker | None) -> psutil.Process | None:
    """The supervisor that has written ``marker``; None where it is gone, or ran before a reboot."""
    if marker is None or marker.boot_id != boot_id():
        return None
    return living_process(marker.supervisor_pid, marker.started_seconds)


def run_lives(flight: Path) -> bool:
    """Whether a run is under way: its marker is there, and its supervisor or its training process lives.

    Between two processes of one run there is no marker for a moment: who waits for the end asks GONE_LOOKS times.
    """
    marker = read_marker(flight / MARKER)
    if marker is None or marker.boot_id != boot_id():
        return False
    if supervisor_of(marker) is not None:
        return True
    recorded = read_flight(flight / RECORDER)
    return recorded is not None and living_process(recorded[0].pid, recorded[0].started_seconds) is not None


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

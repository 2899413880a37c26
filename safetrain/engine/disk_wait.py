"""Waits for room on a full disk instead of losing the run."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import FREE_AND_CONTINUE, DiskFullError, InterruptedRun
from safetrain.core.recorder import Phase, Recorder, Work
from safetrain.core.storage.files import DISK_FULL

WAIT_MINUTES = 30.0
LOOK_SECONDS = 1.0
SPARE_BYTES = 2**20
MIB = 2**20


@dataclass(frozen=True)
class DiskWait:
    """The disk that a run writes to, where it waits for room."""

    folder: Path
    recorder: Recorder
    say: Callable[[str], None]
    stop: Callable[[], int]  # the signal that wants the run to end, 0 for none

    def require(self, needed_bytes: int, what: str) -> None:
        """Raise DiskFullError, before anything is spent, when the first write would have to wait for room."""
        free = shutil.disk_usage(self.folder).free
        if free < needed_bytes + SPARE_BYTES:
            raise DiskFullError(
                f"There is too little room for {what}.",
                where=str(self.folder.resolve()),
                expected=f"{needed_bytes / MIB:,.0f} MiB",
                got=f"{free / MIB:,.0f} MiB free",
                do="free some space, or keep fewer (train.keep_checkpoints)",
            )

    def write(self, needed_bytes: int, step: int, action: Callable[[], None]) -> None:
        """Do ``action``, which writes ``needed_bytes``; while the disk is full, wait, then do it again from its start.

        Raises DiskFullError when the wait is over, InterruptedRun when a signal ends it; the files of earlier writes
        are whole.
        """
        began, is_waiting = time.monotonic(), False
        while True:
            free = shutil.disk_usage(self.folder).free
            if free >= needed_bytes + SPARE_BYTES:
                try:
                    action()
                    return self.say("there is room again") if is_waiting else None
                except OSError as error:
                    if error.errno not in DISK_FULL:
                        raise
            if not is_waiting:
                self.say(self._notice(needed_bytes, step))
            is_waiting = True
            self._wait(needed_bytes, step, began)

    def _wait(self, needed_bytes: int, step: int, began: float) -> None:
        """Until there is room, at most WAIT_MINUTES after ``began``."""
        place = self.folder.resolve()
        with self.recorder.phase(Phase.WAIT, Work(step=step)):
            while True:
                if stop := self.stop():
                    raise InterruptedRun(stop, f"Stopped at step {step} while the disk was full.", do=FREE_AND_CONTINUE)
                if time.monotonic() - began > WAIT_MINUTES * 60:
                    raise DiskFullError(
                        f"The disk stayed full for {WAIT_MINUTES:g} minutes.", where=str(place), do=FREE_AND_CONTINUE
                    )
                time.sleep(LOOK_SECONDS)
                if shutil.disk_usage(self.folder).free >= needed_bytes + SPARE_BYTES:
                    break

    def _notice(self, needed_bytes: int, step: int) -> str:
        return (
            f"the disk of {self.folder.resolve()} is full: step {step} needs {needed_bytes / MIB:,.1f} MiB. Training "
            f"waits for room, {WAIT_MINUTES:g} minutes at most (process {os.getpid()}); nothing is lost"
        )

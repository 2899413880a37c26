"""The second training is refused with the first one's process id; a dead holder blocks nobody."""

import os
import signal
import subprocess
import sys
import time

import pytest

from safetrain.core.errors import AlreadyRunningError
from safetrain.core.lock import training_lock

HOLD = (
    "import time\nfrom safetrain.core.lock import training_lock\n"
    "with training_lock('default'):\n    print('held', flush=True)\n    time.sleep(60)\n"
)


def test_the_second_training_is_refused_and_a_killed_first_one_is_not_in_the_way() -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(AlreadyRunningError, match=f"process {first.pid}"), training_lock("default"):
            pass
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        first.stdout.close()
    deadline = time.monotonic() + 5
    while True:
        try:
            with training_lock("default"):
                break
        except AlreadyRunningError:
            assert time.monotonic() < deadline

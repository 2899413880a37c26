"""What a supervised process does first."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

THREADS = """
import re, threading
from pathlib import Path
from safetrain.engine.child_process import limit_memory

def private_kib():
    return int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

limit_memory(2**31)
before, done = private_kib(), threading.Event()
threads = [threading.Thread(target=done.wait) for _ in range(4)]
for thread in threads:
    thread.start()
print(private_kib() - before)
done.set()
"""


def test_under_a_limit_on_private_memory_threads_take_little_of_it() -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux caps private memory")
    done = subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 4 * 1024  # the usual stack alone would be 8 MiB for each


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux caps private memory")
def test_a_process_that_measures_has_the_limit_that_a_training_has() -> None:
    """Not less by what the limit leaves to other memory, which it holds already."""
    program = """
import resource
from safetrain.engine.child_process import limit_memory
limit_memory(2**30)
from safetrain.engine.backend import keep_to_room
keep_to_room(2**30)
keep_to_room(2**31)
print(resource.getrlimit(resource.RLIMIT_DATA)[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 2**30

"""What a supervised process does first: it bounds its private memory."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROGRAM = """
import re, resource, threading
from pathlib import Path
from safetrain.engine.child_process import limit_memory

def private_kib():
    return int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

limit_memory(2**31)
before, done = private_kib(), threading.Event()
threads = [threading.Thread(target=done.wait) for _ in range(4)]
for thread in threads:
    thread.start()
taken = private_kib() - before
done.set()
from safetrain.engine.backend import keep_to_room
keep_to_room(2**31)
keep_to_room(2**32)
print(taken, resource.getrlimit(resource.RLIMIT_DATA)[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux caps private memory")
def test_under_a_limit_threads_take_little_of_it_and_a_process_that_measures_has_the_same_limit() -> None:
    """Not less by what the limit leaves to other memory, which it holds already."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    taken_kib, limit_bytes = map(int, done.stdout.split())
    assert taken_kib < 4 * 4 * 1024  # the usual stack alone would be 8 MiB for each
    assert limit_bytes == 2**31

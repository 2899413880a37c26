"""A few of the inputs that benchmarks/bench_hostile.py makes by the thousand: each ends with a result or in words."""

import re
import subprocess
import sys

from tests.conftest import ROOT

CASES = 24


def test_hostile_inputs_end_in_words() -> None:
    """In a process of its own: it forks, which mlx does not survive."""
    command = [sys.executable, "-m", "benchmarks.bench_hostile", "--seed", "5", "--cases", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.search(r"^\| all \| (\d+) \| (\d+) \| 0 \| 0 \| 0 \| 0 \|$", done.stdout, re.MULTILINE)
    assert found is not None
    assert found[1] == found[2]
    assert int(found[1]) >= CASES

"""No fault of mlx-lm that benchmarks/bench_faults.py shows is in a run of ours."""

import pytest

from tests.support.faults.all_cases import FAULTS
from tests.support.faults.fault import Fault


def test_the_fifteen_are_there() -> None:
    assert [fault.number for fault in FAULTS] == list(range(1, 16))
    assert all(fault.argument for fault in FAULTS if not fault.observable)


@pytest.mark.parametrize("fault", FAULTS, ids=[str(fault.number) for fault in FAULTS])
def test_ours_does_not(fault: Fault) -> None:
    finding = fault.ours()
    assert not finding.faulty, finding.text

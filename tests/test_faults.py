"""Every fault that benchmarks/bench_faults.py claims: mlx-lm shows it, a run of ours does not."""

import pytest

from tests.support.faults.all_cases import FAULTS
from tests.support.faults.fault import Fault

each = pytest.mark.parametrize("fault", FAULTS, ids=[str(fault.number) for fault in FAULTS])


def test_the_fifteen_are_there() -> None:
    assert [fault.number for fault in FAULTS] == list(range(1, 16))
    assert all(fault.argument for fault in FAULTS if not fault.observable)


@each
def test_mlx_lm_shows_it(fault: Fault) -> None:
    finding = fault.peer()
    assert finding.faulty, finding.text


@each
def test_ours_does_not(fault: Fault) -> None:
    finding = fault.ours()
    assert not finding.faulty, finding.text

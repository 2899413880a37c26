"""The self-test passes on what is right and fails on what is wrong."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.core.errors import MachineError
from safetrain.plan.selftest import judge, selftest
from tests.conftest import ROOT

MODULE = "safetrain.engine.selftest"


@pytest.mark.parametrize("bits", [None, 4])
def test_a_sound_backend_passes(tiny_model: Callable[..., Path], bits: int | None) -> None:
    verdicts = selftest(MODULE, tiny_model(bits=bits), 3, 40)
    assert [verdict.name for verdict in verdicts] == ["loss", "gradient", "slope", "rows", "time", "memory"]
    assert all(verdict.passed for verdict in verdicts), verdicts


def test_a_wrong_gradient_fails() -> None:
    found = {
        "in_float32": True, "on_cpu": True, "has_experts": False, "rounds": False,
        "loss_difference": 1e-7, "gradient_difference": 0.2, "slope_difference": 0.3,
        "packs_rows": True, "layers_with_adapter": 2, "step_seconds": 1.0, "tokens_per_second": 1.0,
        "peak_memory_bytes": 1,
    }  # fmt: skip
    assert [verdict.name for verdict in judge(found) if not verdict.passed] == ["gradient", "slope"]


def test_a_death_is_an_answer(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="did not come to its end"):
        selftest(MODULE, tmp_path / "nowhere", 1, 8)


def test_the_command_says_what_it_found() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "safetrain.cli", "selftest"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.count("[ok]") == 6
    assert done.stdout.endswith("the self-test passed\n")

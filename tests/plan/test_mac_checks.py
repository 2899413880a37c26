"""What a Mac says of itself is read as macOS means it; the readings are published ones."""

from pathlib import Path

import pytest

from safetrain.plan import machine, preflight
from safetrain.plan.checks import power_check, pressure_check, watchdog_check

PANICS = [Path(f"panic-full-2026-09-{day:02}-101112.0002.panic") for day in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("level", "free_percent", "status"),
    [
        (1, 54, "pass"),  # an idle M1 8 GB with 3.3 of 4 GB of swap in use
        (1, 69, "pass"),  # an M1 8 GB before it trained a 7B (Soup PR #663)
        (2, 46, "pass"),  # level 2 stays on 8 GB Macs while there is room
        (2, 14, "warn"),  # the same M1 while it trained
        (4, 30, "warn"),
        (0, 0, "pass"),  # a system that does not say
    ],
)
def test_memory_is_short_by_pressure_and_not_by_swap(level: int, free_percent: int, status: str) -> None:
    check = pressure_check(level, free_percent)
    assert (check.id, check.status, check.critical) == ("ENV-SWAP", status, False)
    assert f"{free_percent} % free" in check.found or (level, check.found) == (0, "not known")


def test_a_laptop_on_battery_is_told() -> None:
    assert power_check(True, 100).status == "pass"
    check = power_check(False, 41.6)
    assert (check.status, check.found) == ("warn", "battery, 42 %")


def test_the_gpu_watchdog_is_named_where_macos_has_it() -> None:
    assert "screen" in watchdog_check("26.6.2", []).found
    assert watchdog_check("26.6.2", []).status == "pass"
    assert watchdog_check("15.5", []).found == "macOS 15.5"
    assert watchdog_check("", []).status == "pass"


def test_kernel_panics_of_late_are_counted_and_named() -> None:
    check = watchdog_check("15.5", PANICS)
    assert (check.status, check.critical) == ("warn", False)
    assert "4 kernel panics in 72 hours" in check.found
    assert PANICS[-1].name in check.found
    assert PANICS[0].name not in check.found  # the last three are enough
    assert "display" in check.remedy


def test_every_check_can_be_named_in_params() -> None:
    found = {pressure_check(1, 54).id, power_check(True, 100).id, watchdog_check("26.6", []).id}
    assert found <= set(preflight.IDS)


def test_an_upgrade_of_macos_voids_what_was_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GB machines may use 10.67 GiB under macOS 15 and 11.84 under 26, with the same wired limit (0)."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(machine, "sysctl_number", lambda _name: 0)
    monkeypatch.setattr(machine, "chip_name", lambda: "Apple M1 Pro")
    paths = []
    for release in ("24.6.0", "25.6.0"):
        monkeypatch.setattr("platform.release", lambda release=release: release)
        paths.append(machine.answer_path("a model"))
    assert len(set(paths)) == 2

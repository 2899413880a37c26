"""Checks that only a Mac needs before a training: memory pressure, power, kernel panics."""

import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from safetrain.core.formatting import counted
from safetrain.core.memory.macos import CRITICAL, FREE_PERCENT, PRESSURE_LEVEL, REPORTS, reports_since, sysctl_number
from safetrain.plan.checks import Check, verdict

# An idle 8 GB M1 has 54 and more; with 44, 11 of 24 GB did not fit (john-rocky/apple-silicon-llm-bench #7).
LITTLE_FREE_PERCENT = 45
LEVELS = {1: "normal", 2: "warning", CRITICAL: "critical"}
PANIC_HOURS = 72
WATCHDOG_SINCE = 26  # macOS: GPU work that keeps the screen waiting is ended (mlx#3267)


def on_mac() -> bool:
    """Whether these checks apply."""
    return sys.platform == "darwin"


def mac_checks() -> list[Check]:
    """All checks, by today's readings."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    checks = [
        pressure_check(sysctl_number(PRESSURE_LEVEL), sysctl_number(FREE_PERCENT)),
        watchdog_check(platform.mac_ver()[0], reports_since("*.panic", time.time() - 3600 * PANIC_HOURS)),
    ]
    return checks if battery is None else [*checks, power_check(bool(battery.power_plugged), battery.percent)]


def pressure_check(level: int, free_percent: int) -> Check:
    """Whether the machine is short of memory already, by macOS itself.

    Swap in use says nothing: macOS swaps what is idle while half of its memory is free, and enlarges swap as it goes.
    Level 2 says little: it stays on 8 GB machines that have 46 % free.
    """
    short = level >= CRITICAL or 0 < free_percent < LITTLE_FREE_PERCENT
    reading = f"pressure {LEVELS[level]}, {free_percent} % free" if level in LEVELS else "not known"
    return verdict("ENV-SWAP", "memory pressure", not short, False, reading,
                   f"not critical, at least {LITTLE_FREE_PERCENT} % free", f"sysctl {PRESSURE_LEVEL}, {FREE_PERCENT}",
                   "close other programs: a training that swaps is ten times slower")  # fmt: skip


def power_check(plugged: bool, percent: float) -> Check:
    """A laptop on battery."""
    text = "mains" if plugged else f"battery, {percent:.0f} %"
    return verdict("MAC-POWER", "power", plugged, False, text, "mains", "psutil", "plug it in, and leave the lid open")


def watchdog_check(version: str, panics: Sequence[Path]) -> Check:
    """Kernel panics of the last days, of which GPU work is a known cause (mlx#3186), and what macOS 26 does to it."""
    watched = int(version.partition(".")[0] or 0) >= WATCHDOG_SINCE
    text = f"macOS {version}"
    if watched:
        text += " may end GPU work while the screen is in use (the training then goes on in shorter pieces)"
    if panics:
        names = ", ".join(path.name for path in panics[-3:])
        text += f"; {counted(len(panics), 'kernel panic')} in {PANIC_HOURS} hours: {names}"
    return verdict("MAC-WATCHDOG", "GPU watchdog", not panics, False, text, "no kernel panic of late",
                   str(REPORTS), "let the display sleep while it trains; a training that is cut "
                   "off continues with the same command")  # fmt: skip

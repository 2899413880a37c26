"""The system's side of the self-test's report: versions, memory, make, reports of kills. Never mlx, no user names."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from safetrain.core.memory.budget import Readings, read_memory
from safetrain.core.memory.cgroup import memory_groups, memory_limit_bytes
from safetrain.core.memory.macos import REPORTS
from safetrain.plan.machine import chip_name, version_of

SECONDS = 20.0  # for a program of the system to answer
MAKEFILE = """export PATH := {folder}:$(PATH)
name:
\t@safetrain-found
path:
\t@"{folder}/safetrain-found"
"""


@dataclass(frozen=True)
class MakeFinds:
    """Whether make's recipes find a program in the PATH that the Makefile exports, and by its quoted path."""

    version: str
    by_name: bool  # make 3.81 looks in the PATH that it was started with
    by_path: bool


@dataclass(frozen=True)
class JetsamAccess:
    """Whether macOS's reports of kills can be listed, and one of them read."""

    reports: int
    readable: bool


@dataclass(frozen=True)
class SystemFacts:
    """What the system says. Sizes in bytes."""

    system: str
    is_macos: bool
    chip: str
    architecture: str
    cores: int
    versions: tuple[str, ...]
    memory: Readings
    swap_used_bytes: int
    swap_total_bytes: int
    container_limit_bytes: int | None
    make: MakeFinds | None  # without make
    jetsam: JetsamAccess | None  # not macOS


def read_system() -> SystemFacts:
    """Ask everything; takes about a second."""
    swap = psutil.swap_memory()
    is_macos = sys.platform == "darwin"
    return SystemFacts(
        system=f"macOS {platform.mac_ver()[0]}" if is_macos else f"{platform.system()} {platform.release()}",
        is_macos=is_macos,
        chip=chip_name(),
        architecture=platform.machine(),
        cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        versions=_versions(),
        memory=read_memory(),
        swap_used_bytes=swap.used,
        swap_total_bytes=swap.total,
        container_limit_bytes=memory_limit_bytes(memory_groups()),
        make=ask_make(),
        jetsam=ask_jetsam(REPORTS),
    )


def ask_make() -> MakeFinds | None:
    """What the system's make does with a program of ours; None where there is no make."""
    make = "/usr/bin/make" if Path("/usr/bin/make").is_file() else shutil.which("make")
    if make is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        program = folder / "safetrain-found"
        program.write_text("#!/bin/sh\necho found\n", encoding="utf-8")
        program.chmod(0o755)
        (folder / "Makefile").write_text(MAKEFILE.format(folder=folder), encoding="utf-8")
        by_name, by_path = (_answer([make, "-f", str(folder / "Makefile"), goal]) for goal in ("name", "path"))
    return MakeFinds(_answer([make, "--version"]).partition("\n")[0], by_name == "found", by_path == "found")


def ask_jetsam(folder: Path) -> JetsamAccess | None:
    """Whether the reports in ``folder`` can be read; None where there is no such folder."""
    try:
        reports = sorted(path for path in folder.iterdir() if path.name.startswith("JetsamEvent"))
        if reports:
            with reports[-1].open("rb") as newest:
                newest.read(1)
        return JetsamAccess(len(reports), readable=True)
    except FileNotFoundError:
        return None
    except OSError:
        return JetsamAccess(0, readable=False)


def _versions() -> tuple[str, ...]:
    libc = " ".join(part for part in platform.libc_ver() if part)
    found = [libc] if libc else []
    found += [f"Python {platform.python_version()}"]
    found += [f"{name} {version_of(name)}" for name in ("mlx", "mlx-lm", "safetrain")]
    if shutil.which("nvidia-smi"):
        driver = _answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).partition("\n")[0]
        found += [f"driver {driver}"] if driver else []
    return tuple(found)


def _answer(command: list[str]) -> str:
    """What a program prints; empty when it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True, env=environment)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()

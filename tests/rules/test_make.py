"""make runs on macOS, whose GNU make is 3.81, and setup says what a Mac lacks before pip fails without a reason."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

TOOLS = ("safetrain", "python", "ruff", "mypy")
RECIPES = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("\t")]
STOPPED = 7  # the fake Python's answer when it is asked for an environment: setup has chosen it


@pytest.mark.parametrize("tool", TOOLS)
def test_installed_tools_are_run_by_their_path(tool: str) -> None:
    """make 3.81 does not look in the exported PATH (nodemcu-firmware#3707); the quotes also make it start a shell."""
    lines = [line for line in RECIPES if re.search(rf"(^\t@?|[\s/]){tool}[\s\"]", line) and "echo" not in line]
    assert lines
    assert all(f'"$(BIN)/{tool}"' in line for line in lines)
    assert not any(re.search(rf"(^\t@?|(do|then|&&|;) ){tool}\s", line) for line in lines)


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def python(folder: Path, name: str, machine: str) -> None:
    """A Python that is new enough, of an architecture."""
    program(folder, name, f'case "$*" in *platform.machine*) echo {machine};; *venv*.venv*) exit {STOPPED};; esac')


def set_up(folder: Path, macos: str, silicon: str = "1") -> "subprocess.CompletedProcess[str]":
    """Run setup.sh in an empty folder of a Mac with the programs in ``folder / bin`` alone."""
    programs = folder / "bin"
    program(programs, "uname", "echo Darwin")
    program(programs, "sw_vers", f"echo {macos}")
    program(programs, "sysctl", f"echo {silicon}")
    return run_setup(programs)


def run_setup(programs: Path) -> "subprocess.CompletedProcess[str]":
    for name in ("sh", "rm", "touch"):
        (programs / name).symlink_to(shutil.which(name) or name)
    command = [str(programs / "sh"), str(ROOT / "tools" / "setup.sh"), "metal"]
    return subprocess.run(
        command,
        cwd=programs.parent,
        env={**os.environ, "PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def mac(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    return tmp_path


@pytest.mark.parametrize(("version", "pythons", "code", "said"), [
    ("13.7.8", {"python3": "arm64"}, 1, "needs macOS 14 or newer, and this is macOS 13.7.8"),
    (
        "26.6.2",
        {"python3": "x86_64", "python3.13": "arm64"},
        STOPPED,
        "python3: it is an x86_64 Python, which runs",
    ),
    ("14.0", {"python3": "x86_64"}, 1, "needs an arm64 Python"),
])  # fmt: skip
def test_an_old_macos_and_pythons_under_rosetta_are_told(
    mac: Path, version: str, pythons: dict[str, str], code: int, said: str
) -> None:
    for name, machine in pythons.items():
        python(mac / "bin", name, machine)
    done = set_up(mac, version)
    assert (done.returncode, said in done.stderr, (mac / ".venv").exists()) == (code, True, False)


def test_an_intel_mac_is_told(mac: Path) -> None:
    done = set_up(mac, "15.5", silicon="0")
    assert (done.returncode, "this is an Intel Mac" in done.stderr, "use a Mac" in done.stderr) == (1, True, True)


@pytest.mark.parametrize(("said", "code"), [
    ("ldd (GNU libc) 2.34", 1), ("ldd (Debian GLIBC 2.31-13+deb11u11) 2.31", 1), ("ldd (GNU libc) 2.28", 1),
    ("musl libc (x86_64)", 1), ("ldd (Ubuntu GLIBC 2.35-0ubuntu3.8) 2.35", STOPPED), ("ldd (GNU libc) 2.40", STOPPED),
])  # fmt: skip
def test_an_old_c_library_is_told(mac: Path, said: str, code: int) -> None:
    program(mac / "bin", "uname", "echo Linux")
    program(mac / "bin", "ldd", f"echo '{said}'\necho Copyright")
    python(mac / "bin", "python3", "x86_64")
    done = run_setup(mac / "bin")
    assert (done.returncode, said in done.stderr) == (code, code == 1)


def test_uv_s_choice_is_looked_at_too(mac: Path) -> None:
    made = mac / "made"
    made.mkdir()
    python(made, "python", "x86_64")
    # `uv venv` leaves an x86_64 Python behind, as uv under Rosetta does
    program(mac / "bin", "uv", f'mkdir -p .venv/bin && cp "{made}/python" .venv/bin/python')
    for name in ("mkdir", "cp"):
        (mac / "bin" / name).symlink_to(shutil.which(name) or name)
    done = set_up(mac, "15.5")
    assert done.returncode == 1
    assert "uv chose an x86_64 Python" in done.stderr
    assert not (mac / ".venv").exists()


FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
REQUIRED = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
PYTHONS = (int(REQUIRED[1]), int(REQUIRED[2]) - 1) if REQUIRED else (0, 0)  # minor versions: the first, the last
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")


def jobs(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load(text)["jobs"].values())


def test_the_same_pythons_are_named_everywhere() -> None:
    least, newest = PYTHONS
    between = f"3.{least} to 3.{newest}"
    for name in ("README.md", "docs/tutorial.md", "tools/setup.sh"):
        assert between in (ROOT / name).read_text(), name
    setup = (ROOT / "tools" / "setup.sh").read_text()
    assert f">=3.{least},<3.{newest + 1}" in setup
    assert f"(3, {least}) <= sys.version_info < (3, {newest + 1})" in setup


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_may_only_read(path: Any) -> None:
    text = path.read_text(encoding="utf-8")
    used = [line.partition("uses:")[2].strip() for line in text.splitlines() if "uses:" in line]
    assert used
    assert all(PINNED.fullmatch(action) for action in used), used
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in jobs(text))

#!/bin/sh
# Creates .venv and installs safetrain with pinned dependencies: uv when it is there, pip otherwise.
# usage: sh tools/setup.sh BACKEND [dev]        (called by make; dev: what tests and docs need too)
set -eu
backend=$1
dev=${2:-}
stamp=.venv/.installed-$backend
here=$(/bin/pwd -P 2>/dev/null || pwd -P) # as make's CURDIR: a Mac's sh keeps the capitals that were typed
extras=$dev
[ "$backend" = metal ] || extras=${dev:+$dev,}$backend
what="the dependencies"
[ -z "$dev" ] || what="what tests and docs need"

say() { printf '%s\n' "$*" >&2; }

# Two backends bring the same library: one is removed with its environment before the other comes.
for other in .venv/.installed-*; do
    if [ -e "$other" ] && [ "$other" != "$stamp" ]; then
        say "Removing .venv, which has another backend (${other#.venv/.installed-}) ..."
        rm -rf .venv
    fi
done

# Its Python may be gone, after an upgrade of the system's.
[ ! -d .venv ] || .venv/bin/python -c '' 2>/dev/null || rm -rf .venv

# Its programs name the folder that the environment was made in.
if [ -e .venv/bin/safetrain ] && ! grep -qF "$here/.venv/" .venv/bin/safetrain; then
    say "Removing .venv, which was made in another folder ..."
    rm -rf .venv
fi

installed() {
    printf '%s' "$here" >"$stamp"
    [ -z "$dev" ] || touch .venv/.dev
}

# mlx has wheels for Apple silicon with macOS 14, and for glibc 2.35, or newer; pip says only that it found none.
mac=
if [ "$(uname -s)" = Darwin ]; then
    mac=yes
    version=$(sw_vers -productVersion)
    if [ "${version%%.*}" -lt 14 ]; then
        say "safetrain needs macOS 14 or newer, and this is macOS $version: mlx runs on no older one."
        say "  do: update macOS, then run make again"
        exit 1
    fi
    if command -v sysctl >/dev/null 2>&1 && [ "$(sysctl -n hw.optional.arm64 2>/dev/null)" != 1 ]; then
        say "safetrain needs Apple silicon, and this is an Intel Mac: mlx does not run on one."
        say "  do: use a Mac with an M1 or newer, or Linux"
        exit 1
    fi
elif libc=$(ldd --version 2>&1 | { read -r line && echo "$line"; }); then
    case $libc in # the first line, as in: ldd (GNU libc) 2.34
        *" 2."? | *" 2."[12]? | *" 2.3"[0-4] | musl*)
            say "safetrain needs glibc 2.35 or newer, and this system has another C library: $libc. mlx has no wheels for it."
            say "  do: use Ubuntu 22.04, Debian 12, RHEL 10 or newer, or a container of one of these"
            exit 1
            ;;
    esac
fi

is_native() { # a Python of this Mac's own architecture; mlx has nothing for one that runs under Rosetta
    [ -z "$mac" ] || [ "$("$1" -c 'import platform; print(platform.machine())')" = arm64 ]
}

if command -v uv >/dev/null 2>&1; then
    [ -x .venv/bin/python ] || uv venv --quiet --python '>=3.11,<3.15' .venv
    if ! is_native .venv/bin/python; then
        rm -rf .venv
        say "uv chose an x86_64 Python, which runs under Rosetta: mlx needs arm64."
        say "  do: install uv for arm64 (https://docs.astral.sh/uv), then run make again"
        exit 1
    fi
    say "Installing $what into .venv (uv) ..."
    uv pip install --quiet --python .venv/bin/python --constraint constraints.txt --editable ".${extras:+[$extras]}"
    installed
    exit 0
fi

python=
rosetta=
for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; then
        if is_native "$candidate"; then
            python=$candidate
            break
        fi
        rosetta=$(command -v "$candidate")
        say "Passing over $rosetta: it is an x86_64 Python, which runs under Rosetta."
    fi
done
if [ -z "$python" ] && [ -n "$rosetta" ]; then
    say "safetrain needs an arm64 Python on Apple silicon, and found only x86_64 ones."
    say "  do: install one (/opt/homebrew/bin/brew install python@3.13, or python.org's), then run make again"
    exit 1
fi
if [ -z "$python" ]; then
    say "safetrain needs Python 3.11 to 3.14 and found none ($(python3 --version 2>/dev/null || echo 'no python3'))."
    say "  do: install one (macOS: brew install python@3.13, Debian: apt install python3 python3-venv), then run make again"
    exit 1
fi
.venv/bin/python -m pip --version >/dev/null 2>&1 || rm -rf .venv # made by uv, or half made
if ! [ -x .venv/bin/python ]; then
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        say "This Python ($python, $version) comes without the venv module."
        say "  do: sudo apt install python$version-venv   (or install uv), then run make again"
        exit 1
    fi
    "$python" -m venv .venv
fi
say "Installing $what into .venv (pip) ..."
.venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 --constraint constraints.txt --editable ".${extras:+[$extras]}"
installed

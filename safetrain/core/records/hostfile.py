"""train.hostfile: the machines of a training's ranks, in the format of mlx.launch."""

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError

LOCAL = ("127.0.0.1", "localhost", "::1")
BACKENDS = ("", "ring", "nccl", "jaccl", "jaccl-ring")
FORMAT = '[{"ssh": "127.0.0.1", "ips": ["192.168.1.10"]}, {"ssh": "second-mac.local", "ips": ["192.168.1.11"]}]'


@dataclass(frozen=True)
class Hosts:
    """Where each rank runs."""

    names: tuple[str, ...]  # as ssh takes them, rank 0 first
    backend: str = ""  # as the file says; empty: it does not

    @property
    def all_here(self) -> bool:
        """Whether all ranks are on this machine."""
        return all(is_here(name) for name in self.names)

    @property
    def ranks_here(self) -> int:
        """How many share this machine's memory."""
        return sum(is_here(name) for name in self.names)


def backend_of_ranks(hosts: Hosts, device: str) -> str:
    """How the ranks exchange numbers: as the file says, else NCCL where they compute on CUDA, else the ring."""
    return hosts.backend or ("nccl" if device == "cuda" else "ring")


def is_here(name: str) -> bool:
    """Whether this is a name of the machine itself."""
    return name in (*LOCAL, socket.gethostname())


def hosts_of(hostfile: str | None, ranks: int) -> Hosts:
    """The machines of so many ranks; raises ConfigError where the file is missing, malformed, or names others."""
    if hostfile is None:
        return Hosts((LOCAL[0],) * ranks)
    found = read_hostfile(Path(hostfile))
    if len(found.names) != ranks:
        raise ConfigError(
            "train.hostfile has another number of machines than train.ranks.",
            where=hostfile,
            expected=f"{ranks} entries, one for each rank",
            got=str(len(found.names)),
            do=f"set train.ranks={len(found.names)}, or name a machine twice for two ranks on it",
        )
    if not is_here(found.names[0]):
        raise ConfigError(
            "Rank 0 is not on this machine, which has the run's files.",
            where=hostfile,
            expected=f'"ssh": "{LOCAL[0]}" in the first entry',
            got=found.names[0],
            do="start the training on that machine, or put this one first",
        )
    return found


def read_hostfile(path: Path) -> Hosts:
    """Read a hostfile; raises ConfigError where mlx.launch could not use it."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        entries = value["hosts"] if isinstance(value, dict) else value
        backend = str(value.get("backend", "")) if isinstance(value, dict) else ""
        names = tuple(str(entry["ssh"]) for entry in entries)
        addresses = [entry.get("ips", []) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"train.hostfile cannot be read: {error!r}", where=str(path), expected=f"a JSON list such as {FORMAT}"
        ) from None
    if backend not in BACKENDS:
        raise ConfigError(
            "train.hostfile asks for a backend that is not supported here.",
            where=str(path),
            expected=f"one of {', '.join(BACKENDS[1:])}",
            got=backend,
        )
    missing = next((name for name, ips in zip(names, addresses, strict=True) if not ips), None)
    if missing is not None:
        raise ConfigError(
            f"{missing} has no address by which the other ranks reach it.",
            where=str(path),
            expected=f'"ips" in each entry, as in {FORMAT}',
        )
    return Hosts(names, backend)

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
    """The host of each rank."""

    names: tuple[str, ...]  # names for ssh, rank 0 first
    backend: str = ""  # named in the file; empty: none
    ports: int = 0  # number of the ring's ports, one for each address
    launched: str = ""  # the file for mlx.launch, which knows this machine by one name and reaches the others by ssh

    @property
    def all_here(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.ranks_here == len(self.names)

    @property
    def ranks_here(self) -> int:
        """Number of ranks that share this machine's memory."""
        return sum(is_here(name) for name in self.names)


def backend_of_ranks(hosts: Hosts, device: str) -> str:
    """Choose mlx's backend for the ranks: the file's, or NCCL on CUDA, or the ring. JACCL needs several machines."""
    backend = hosts.backend or ("nccl" if device == "cuda" else "ring")
    return "ring" if hosts.all_here and backend.startswith("jaccl") else backend


def is_here(name: str) -> bool:
    """Whether ``name`` is this machine."""
    return name in (*LOCAL, socket.gethostname())


def hosts_of(hostfile: str | None, ranks: int) -> Hosts:
    """Find the machines of ``ranks`` ranks; raises ConfigError for a missing, malformed or unfit file."""
    if hostfile is None:
        return Hosts((LOCAL[0],) * ranks)
    hosts = read_hostfile(Path(hostfile))
    if len(hosts.names) != ranks:
        do = f"set train.ranks={len(hosts.names)}, or name a machine twice for two ranks on it"
        raise ConfigError("train.hostfile has not one entry for each rank.", where=hostfile, do=do)
    if not is_here(hosts.names[0]):
        what, do = "Rank 0 must be on this machine, which has the run's files.", "put this machine first, as 127.0.0.1"
        raise ConfigError(what, where=hostfile, got=hosts.names[0], do=do)
    return hosts


def read_hostfile(path: Path) -> Hosts:
    """Read a hostfile; raises ConfigError if mlx.launch could not use it."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        rest, entries = (value, value["hosts"]) if isinstance(value, dict) else ({}, value)
        backend, names = rest.get("backend", ""), tuple(str(entry["ssh"]) for entry in entries)
        if not names or backend not in BACKENDS:
            raise ValueError(f"its backend is {backend}, not one of {', '.join(BACKENDS[1:])}" if names else "no entry")
        for entry in entries:
            if not isinstance(entry.get("ips"), list) or not entry["ips"]:
                raise ValueError(f'{entry["ssh"]} has no address ("ips")')
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"train.hostfile cannot be read: {error}",
            where=str(path),
            expected=f"a JSON list such as {FORMAT}",
            do="write one entry for each rank, this machine first",
        ) from None
    renamed = [{**entry, "ssh": LOCAL[0] if is_here(entry["ssh"]) else entry["ssh"]} for entry in entries]
    launched = json.dumps({**rest, "hosts": renamed} if rest else renamed)
    return Hosts(names, backend, sum(len(entry["ips"]) for entry in entries), launched)

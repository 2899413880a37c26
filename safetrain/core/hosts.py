"""hosts.json: the machines of the ranks, in the format of mlx.launch."""

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError

LOCAL = ("127.0.0.1", "localhost", "::1")
BACKENDS = ("", "ring", "nccl", "jaccl", "jaccl-ring")  # in a hostfile
HOSTS_FILE = Path("hosts.json")
EXAMPLE_HOSTS = '[{"ssh": "127.0.0.1", "ips": ["192.168.1.10"]}, {"ssh": "second-mac.local", "ips": ["192.168.1.11"]}]'


@dataclass(frozen=True)
class Hosts:
    names: tuple[str, ...]  # names for ssh, rank 0 first
    backend: str = ""  # named in the file; empty: none
    ports: int = 0  # number of the ring's ports, one for each address
    launched: str = ""  # the file for mlx.launch, which knows this machine by one name and reaches the others by ssh

    @property
    def ranks_here(self) -> int:
        """Number of ranks that share this machine's memory."""
        return sum(is_here(name) for name in self.names)

    @property
    def all_here(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.ranks_here == len(self.names)

    def backend_on(self, device: str) -> str:
        """mlx's backend for the ranks: the hostfile's, or NCCL on CUDA, or the ring. JACCL needs several machines."""
        backend = self.backend or ("nccl" if device == "cuda" else "ring")
        return "ring" if self.all_here and backend.startswith("jaccl") else backend


def is_here(name: str) -> bool:
    """Whether ``name`` is this machine."""
    return name in (*LOCAL, socket.gethostname())


def hosts_of(ranks: int, hostfile: Path = HOSTS_FILE) -> Hosts:
    """The machines of ``ranks`` ranks, this one if there is no file; raises ConfigError if it is unsuitable."""
    if ranks == 1 or not hostfile.exists():
        return Hosts((LOCAL[0],) * ranks)
    hosts = read_hostfile(hostfile)
    if len(hosts.names) != ranks:
        do = f"set train.ranks={len(hosts.names)}, or name a machine twice for two ranks on it"
        raise ConfigError("The file does not have one entry for each rank.", where=hostfile, do=do)
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
        ports = sum(len(entry["ips"]) for entry in entries)
        if backend not in BACKENDS:
            raise ValueError(f"its backend is {backend}, not one of {', '.join(BACKENDS[1:])}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what, do = f"The file cannot be read: {error}", "write one entry for each rank, this machine first"
        raise ConfigError(what, where=path, expected=f"a JSON list such as {EXAMPLE_HOSTS}", do=do) from None
    renamed = [{**entry, "ssh": LOCAL[0] if is_here(entry["ssh"]) else entry["ssh"]} for entry in entries]
    return Hosts(names, backend, ports, json.dumps({**rest, "hosts": renamed} if rest else renamed))

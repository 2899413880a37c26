"""Where ranks run, and what each of those on one machine may take of its memory."""

import json
import socket
from pathlib import Path

import pytest

from safetrain.core.errors import ConfigError
from safetrain.core.memory.system import DATA_BESIDE_BYTES, MemoryBudget
from safetrain.core.records.settings import Hosts, TrainJob, hosts_of, read_hostfile, shared_by
from tests.support.settings import SETTINGS

HERE = {"ssh": "127.0.0.1", "ips": ["192.168.1.10"]}
THERE = {"ssh": "second-mac.local", "ips": ["192.168.1.11"]}
GIB = 2**30


def test_a_file_of_mlx_launch_is_read_as_it_does_and_without_one_all_ranks_are_here(tmp_path: Path) -> None:
    hosts, hostfile = hosts_of(None, 3), tmp_path / "hosts.json"
    assert (hosts.all_here, hosts.ranks_here) == (True, 3)
    assert [hosts.backend_on(device) for device in ("cpu", "metal", "cuda")] == ["ring", "ring", "nccl"]
    hostfile.write_text(json.dumps([HERE, THERE]))
    hosts = hosts_of(str(hostfile), 2)
    assert (hosts.names, hosts.all_here, hosts.ranks_here) == (("127.0.0.1", "second-mac.local"), False, 1)
    hostfile.write_text(json.dumps({"backend": "jaccl", "hosts": [{**HERE, "ssh": socket.gethostname()}, THERE]}))
    hosts = hosts_of(str(hostfile), 2)
    assert (hosts.backend_on("metal"), hosts.ranks_here) == ("jaccl", 1)
    assert Hosts(("127.0.0.1", "127.0.0.1"), "jaccl").backend_on("metal") == "ring", "on one machine"


@pytest.mark.parametrize(("content", "words"), [
    ([HERE], "one entry for each rank"),
    ([THERE, HERE], "Rank 0 must be on this machine"),
    ([HERE, {"ssh": "second-mac.local"}], "cannot be read: 'ips'"),
    ({"backend": "mpi", "hosts": [HERE, THERE]}, "its backend is mpi"),
    ({"machines": []}, "cannot be read"),
    ("second-mac.local", "cannot be read"),
    (None, "cannot be read"),
])  # fmt: skip
def test_a_file_that_mlx_launch_could_not_use_is_refused(tmp_path: Path, content: object, words: str) -> None:
    hostfile = tmp_path / "hosts.json"
    if content is not None:
        hostfile.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words):
        hosts_of(str(hostfile), 2)


def job(total_bytes: int, limit_bytes: int | None) -> TrainJob:
    return TrainJob("model", SETTINGS, True, MemoryBudget(total_bytes), None, memory_limit_bytes=limit_bytes)


def test_ranks_on_one_machine_share_its_memory() -> None:
    assert shared_by(job(8 * GIB, None), 1) == job(8 * GIB, None)
    assert shared_by(job(8 * GIB, None), 4).memory_budget.total_bytes == 2 * GIB

    planned = job(GIB - DATA_BESIDE_BYTES, GIB)
    assert shared_by(planned, 4) == planned  # a limit of one's own is that of each rank


def test_a_launcher_is_told_of_this_machine_by_one_name(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    entries = [{"ssh": "localhost", "ips": ["10.0.0.1", "10.0.0.2"]}, {"ssh": "b", "ips": ["10.0.0.3"]}]
    path.write_text(json.dumps({"envs": ["A=1"], "hosts": entries}))
    launched = json.loads(read_hostfile(path).launched)
    assert [each["ssh"] for each in launched["hosts"]] == ["127.0.0.1", "b"]
    assert launched["envs"] == ["A=1"]
    assert read_hostfile(path).ports == 3

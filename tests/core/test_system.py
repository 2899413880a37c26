"""What the system says of memory: groups of Linux, macOS's reports of kills, what a process takes, its own limit."""

import ctypes
import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from safetrain.core.errors import ConfigError
from safetrain.core.hosts import Hosts, hosts_of, read_hostfile
from safetrain.core.memory.system import (
    RUSAGE_BYTES,
    footprint_bytes,
    memory_groups,
    memory_limit_bytes,
    memory_room_bytes,
    most_footprint_bytes,
    oom_kills,
    parse_rusage,
)
from safetrain.core.records.settings import job_of
from tests.conftest import ROOT
from tests.plan.test_recommend import NO_LORA_PINS, OPEN, plan

GIB = 2**30
NO_LIMIT_V1 = 9223372036854771712  # what version 1 says without a limit


def group_v2(folder: Path, limit: str, kills: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 12\noom 7\noom_kill {kills}\noom_group_kill 9\n")
    return folder


def group_v1(folder: Path, limit: int, kills: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
    return folder


def mine(folder: Path, *lines: str) -> Path:
    """As /proc/self/cgroup."""
    path = folder / "cgroup"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_version_2_takes_the_smallest_limit_on_the_way_up(tmp_path: Path) -> None:
    root = tmp_path / "cg"
    inner = group_v2(root / "user.slice" / "run.scope", "max", kills=2)
    outer = group_v2(root / "user.slice", str(3 * GIB))
    group_v2(root / "system.slice", str(GIB))  # not ours
    groups = memory_groups(root, mine(tmp_path, "0::/user.slice/run.scope"))
    assert groups == [inner, outer]
    assert memory_limit_bytes(groups) == 3 * GIB
    assert oom_kills(groups) == 2  # oom, oom_group_kill and max are other counters
    group_v2(inner, str(2 * GIB))
    assert memory_limit_bytes(groups) == 2 * GIB
    group_v2(outer, "max")
    group_v2(inner, "max")
    assert memory_limit_bytes(groups) is memory_limit_bytes([]) is None


def test_version_1_takes_the_memory_controller_among_others(tmp_path: Path) -> None:
    root = tmp_path / "cg"
    inner = group_v1(root / "memory" / "docker" / "abc", 2 * GIB, kills=1)
    top = group_v1(root / "memory", NO_LIMIT_V1)
    group_v1(root / "cpu" / "docker" / "abc", GIB)
    (root / "unified").mkdir()  # of version 2, without memory
    lines = ("12:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc", "1:name=systemd:/docker/abc", "0::/docker/abc")
    groups = memory_groups(root, mine(tmp_path, *lines))
    assert groups == [inner, top]
    assert (memory_limit_bytes(groups), oom_kills(groups)) == (2 * GIB, 1)
    group_v1(inner, NO_LIMIT_V1)
    assert memory_limit_bytes(groups) is None


def test_in_a_container_the_name_outside_of_it_leads_to_the_top(tmp_path: Path) -> None:
    """Docker's /proc/self/cgroup may name a folder that is not mounted there."""
    top = group_v1(tmp_path / "cg" / "memory", 2 * GIB)
    assert memory_groups(tmp_path / "cg", mine(tmp_path, "4:memory:/docker/0123/x")) == [top]
    top = group_v2(tmp_path / "cg2", str(GIB))
    groups = memory_groups(tmp_path / "cg2", mine(tmp_path, "0::/docker/0123/x"))
    assert groups == [top]
    assert memory_limit_bytes(groups) == GIB
    for odd in ("0::/a:b/c", "0::/../../a"):
        assert top in memory_groups(tmp_path / "cg2", mine(tmp_path, odd))
    assert memory_groups(tmp_path / "nothing", mine(tmp_path, "0::/")) == memory_groups(tmp_path, tmp_path / "x") == []
    assert oom_kills([]) == oom_kills([tmp_path / "gone"]) == 0


def test_room_is_what_the_tightest_group_has_left_without_the_file_cache(tmp_path: Path) -> None:
    """A file that was read twice is on the active list, and the kernel gives it back all the same."""
    inner, outer = tmp_path / "outer" / "inner", tmp_path / "outer"
    inner.mkdir(parents=True)
    for folder, limit, used, cache in ((inner, "max", GIB // 2, 0), (outer, str(2 * GIB), GIB, GIB // 4)):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(used))
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache // 2}\nactive_file {cache // 2}\n")
    assert memory_room_bytes([inner, outer]) == GIB + GIB // 4
    assert memory_room_bytes([inner]) is None


# XNU bsd/sys/resource.h, struct rusage_info_v4, behind uint8_t ri_uuid[16]: uint64_t fields in this order.
RUSAGE_V4 = """user_time system_time pkg_idle_wkups interrupt_wkups pageins wired_size resident_size phys_footprint
proc_start_abstime proc_exit_abstime child_user_time child_system_time child_pkg_idle_wkups child_interrupt_wkups
child_pageins child_elapsed_abstime diskio_bytesread diskio_byteswritten cpu_time_qos_default cpu_time_qos_maintenance
cpu_time_qos_background cpu_time_qos_utility cpu_time_qos_legacy cpu_time_qos_user_initiated
cpu_time_qos_user_interactive billed_system_time serviced_system_time logical_writes lifetime_max_phys_footprint
instructions cycles billed_energy serviced_energy interval_max_phys_footprint runnable_time"""


class RusageV4(ctypes.LittleEndianStructure):
    """As the header has it."""

    _fields_ = (("ri_uuid", ctypes.c_uint8 * 16), *((f"ri_{name}", ctypes.c_uint64) for name in RUSAGE_V4.split()))


def test_both_footprints_are_read_from_their_places() -> None:
    """Resident memory of 1.9 GB with 4.7 GB of weights in use was seen on an 8 GB M1."""
    filled = RusageV4(**{f"ri_{name}": number for number, name in enumerate(RUSAGE_V4.split())})
    filled.ri_resident_size, filled.ri_phys_footprint = int(1.9 * GIB), int(4.9 * GIB)
    filled.ri_lifetime_max_phys_footprint = 5 * GIB
    content = bytes(filled).ljust(RUSAGE_BYTES, b"\0")
    assert ctypes.sizeof(RusageV4) == 296 <= RUSAGE_BYTES
    assert parse_rusage(content) == (int(4.9 * GIB), 5 * GIB)


def test_another_process_s_memory_is_read_and_a_gone_one_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", "kept = bytearray(2**26); print(1, flush=True); input()"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    assert footprint_bytes(process.pid) > 2**26
    if sys.platform != "darwin":
        assert footprint_bytes(process.pid) == pytest.approx(psutil.Process(process.pid).memory_info().rss, rel=0.05)
    process.communicate()
    assert footprint_bytes(process.pid) == 0
    assert most_footprint_bytes() >= footprint_bytes(os.getpid()) > 0


PROGRAM = """
import re, resource, threading
from pathlib import Path
from safetrain.engine.child_process import limit_memory

def private_kib():
    return int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

limit_memory(2**31)
before, done = private_kib(), threading.Event()
threads = [threading.Thread(target=done.wait) for _ in range(4)]
for thread in threads:
    thread.start()
taken = private_kib() - before
done.set()
from safetrain.engine.backend import keep_to_room
keep_to_room(2**31)
keep_to_room(2**32)
print(taken, resource.getrlimit(resource.RLIMIT_DATA)[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux caps private memory")
def test_under_a_limit_threads_take_little_of_it_and_a_process_that_measures_has_the_same_limit() -> None:
    """Not less by what the limit leaves to other memory, which it holds already."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    taken_kib, limit_bytes = map(int, done.stdout.split())
    assert taken_kib < 4 * 4 * 1024  # the usual stack alone would be 8 MiB for each
    assert limit_bytes == 2**31


HERE = {"ssh": "127.0.0.1", "ips": ["192.168.1.10"]}
THERE = {"ssh": "second-mac.local", "ips": ["192.168.1.11"]}


def test_a_file_of_mlx_launch_is_read_as_it_does_and_without_one_all_ranks_are_here(tmp_path: Path) -> None:
    hosts, hostfile = hosts_of(3, tmp_path / "hosts.json"), tmp_path / "hosts.json"
    assert (hosts.all_here, hosts.ranks_here) == (True, 3)
    assert [hosts.backend_on(device) for device in ("cpu", "metal", "cuda")] == ["ring", "ring", "nccl"]
    hostfile.write_text(json.dumps([HERE, THERE]))
    hosts = hosts_of(2, hostfile)
    assert (hosts.names, hosts.all_here, hosts.ranks_here) == (("127.0.0.1", "second-mac.local"), False, 1)
    hostfile.write_text(json.dumps({"backend": "jaccl", "hosts": [{**HERE, "ssh": socket.gethostname()}, THERE]}))
    hosts = hosts_of(2, hostfile)
    assert (hosts.backend_on("metal"), hosts.ranks_here) == ("jaccl", 1)
    assert Hosts(("127.0.0.1", "127.0.0.1"), "jaccl").backend_on("metal") == "ring", "on one machine"


@pytest.mark.parametrize(("content", "words"), [
    ([HERE], "one entry for each rank"),
    ([THERE, HERE], "Rank 0 must be on this machine"),
    ([HERE, {"ssh": "second-mac.local"}], "cannot be read: 'ips'"),
    ({"backend": "mpi", "hosts": [HERE, THERE]}, "its backend is mpi"),
    ({"machines": []}, "cannot be read"),
    ("second-mac.local", "cannot be read"),
])  # fmt: skip
def test_a_file_that_mlx_launch_could_not_use_is_refused(tmp_path: Path, content: object, words: str) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words):
        hosts_of(2, hostfile)


def test_ranks_on_one_machine_share_its_memory() -> None:
    planned = plan()

    def share_bytes(ranks: int, **changes: Any) -> int:
        train = dataclasses.replace(OPEN, ranks=ranks, **changes)
        return job_of(train, NO_LORA_PINS, planned, Hosts(("localhost",) * ranks)).memory_budget.total_bytes

    assert share_bytes(1) == planned.memory_budget.total_bytes == 4 * share_bytes(4)
    assert share_bytes(4, memory_limit_gb=1.0) == share_bytes(1)  # a limit of one's own is that of each rank


def test_a_launcher_is_told_of_this_machine_by_one_name(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    entries = [{"ssh": "localhost", "ips": ["10.0.0.1", "10.0.0.2"]}, {"ssh": "b", "ips": ["10.0.0.3"]}]
    path.write_text(json.dumps({"envs": ["A=1"], "hosts": entries}))
    launched = json.loads(read_hostfile(path).launched)
    assert [each["ssh"] for each in launched["hosts"]] == ["127.0.0.1", "b"]
    assert launched["envs"] == ["A=1"]
    assert read_hostfile(path).ports == 3

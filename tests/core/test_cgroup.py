"""The memory limit of a container or a service is seen, however deep it is nested, and so are the kernel's kills."""

from pathlib import Path

from safetrain.core.memory.system import memory_groups, memory_limit_bytes, memory_room_bytes, oom_kills

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

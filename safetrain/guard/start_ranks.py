"""Starts the processes of a training: one, or several on this machine that know of each other.

Ranks on this machine get the environment that mlx.launch gives them, but are children of the supervisor: so it has
each one's exit status, words and memory. (mlx.launch starts them through shells and keeps those to itself.)
"""

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from safetrain.core.storage.files import write_text
from safetrain.core.storage.run_files import ERROR, RECORDER, STACKS, rank_folder
from safetrain.guard.ending import WatchSettings
from safetrain.guard.launched import cores_of_each, start_launched
from safetrain.guard.watched_rank import WatchedRank

RING = "ring.json"  # in the flight folder: the ranks' addresses
LOOPBACK = "127.0.0.1"
CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"


def start_ranks(command: Sequence[str], guarding: WatchSettings) -> list[WatchedRank]:
    """Start ``command FLIGHT EVENTS OUR_PID`` for each rank: on this machine, or where a hostfile says."""
    clear_flight(guarding.flight)
    if guarding.hostfile is not None:
        return [start_launched(command, guarding, guarding.hostfile)]
    ranks: list[WatchedRank] = []
    try:
        for number, environment in enumerate(environments(guarding)):
            ranks.append(_start(command, guarding, number, environment))
    except OSError:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
        raise
    return ranks


def clear_flight(flight: Path) -> None:
    """Remove what the processes before have left of themselves."""
    for name in (RECORDER, STACKS, ERROR):
        (flight / name).unlink(missing_ok=True)
    for folder in flight.glob("rank_*"):
        for name in (RECORDER, STACKS, ERROR):
            (folder / name).unlink(missing_ok=True)


def environments(guarding: WatchSettings) -> list[dict[str, str]]:
    """Of each rank, beside ours."""
    ranks, usual = range(guarding.ranks), dict(guarding.environment)
    if guarding.ranks == 1:
        return [usual]
    usual |= cores_of_each(guarding.ranks)
    ports = free_ports(guarding.ranks)
    if guarding.backend == "nccl":  # a device each
        visible = [each for each in os.environ.get(CUDA_DEVICES, "").split(",") if each]
        devices = visible or [str(rank) for rank in ranks]
        shared = {"NCCL_HOST_IP": LOOPBACK, "NCCL_PORT": str(ports[0]), "MLX_WORLD_SIZE": str(guarding.ranks)}
        own = [{"MLX_RANK": str(rank), CUDA_DEVICES: devices[rank % len(devices)]} for rank in ranks]
        return [{**usual, **shared, **each} for each in own]
    hosts = guarding.flight / RING
    write_text(hosts, json.dumps([[f"{LOOPBACK}:{port}"] for port in ports]))
    return [{**usual, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts.resolve())} for rank in ranks]


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def _start(command: Sequence[str], guarding: WatchSettings, number: int, environment: dict[str, str]) -> WatchedRank:
    flight = rank_folder(guarding.flight, number)
    if number:
        flight.mkdir(exist_ok=True)
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [*command, str(flight), str(write_end), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(write_end, *guarding.locks),
        start_new_session=True,
        env={**os.environ, **environment},
    )
    os.close(write_end)
    return WatchedRank(number, flight, process, read_end, guarding)

"""The memory budget of a training process on Metal, CUDA and CPU."""

from safetrain.core.memory.system import GIB, PROCESS_BYTES, Readings, host_room_bytes

# Shares of the working set that Metal recommends, for machines up to 16 GiB and larger ones: an M5 Pro of 24 GB starved
# at 0.93, an 8 GB M1 trained at 0.9 (published: tests/core/readings.py).
METAL_SHARE, LARGE_METAL_SHARE = 0.9, 0.85
# Memory left to macOS, in addition to wired memory: macOS compresses and swaps the rest on demand.
METAL_RESERVE_BYTES, METAL_RESERVE_SHARE = 3 * GIB // 2, 0.1  # the share applies above 16 GiB
LARGE_MACHINE_BYTES = 16 * GIB
TYPICAL_WIRED_BYTES, LARGE_WIRED_BYTES = 8 * GIB // 5, 3 * GIB  # if no reading is available; the second above 8 GiB
# A CUDA context takes 0.13 to 0.75 GiB; cuBLAS workspaces and fragmentation take the rest (published: readings.py).
CUDA_SHARE, CUDA_RESERVE_BYTES = 0.92, GIB // 2


def metal_budget_bytes(
    working_set_bytes: int, total_bytes: int, wired_bytes: int = 0, process_bytes: int = PROCESS_BYTES
) -> int:
    """Memory budget on Metal: a share of the working set plus ``process_bytes``, limited by what wired memory leaves.

    The working set bounds Metal's buffers only, not Python's memory. psutil's ``available`` (inactive and free pages)
    is not used: macOS keeps it small on purpose, 0.5 to 2.7 GiB on Macs of 8 GB on which a 7B model was trained
    (MakazhanAlpamys/Soup #663, giampaolo/psutil #1503).
    """
    large = total_bytes > LARGE_MACHINE_BYTES
    share = LARGE_METAL_SHARE if large else METAL_SHARE
    reserve = int(METAL_RESERVE_SHARE * total_bytes) if large else METAL_RESERVE_BYTES
    typical = TYPICAL_WIRED_BYTES if total_bytes <= LARGE_MACHINE_BYTES // 2 else LARGE_WIRED_BYTES
    remaining = total_bytes - (wired_bytes or typical) - reserve
    return max(0, min(int(share * working_set_bytes) + process_bytes, remaining))


def cuda_budget_bytes(free_bytes: int) -> int:
    """Memory budget on CUDA: a share of the device's free memory, minus the CUDA context."""
    return max(0, int(CUDA_SHARE * (free_bytes - CUDA_RESERVE_BYTES)))


def budget_bytes(backend: str, device_bytes: int, host: Readings, process_bytes: int = PROCESS_BYTES) -> int:
    """Memory that a training process may use on this machine now.

    ``device_bytes``: the working set that Metal recommends, or the free memory of a CUDA device; 0 on a CPU.
    """
    if backend == "cuda":
        return cuda_budget_bytes(device_bytes)
    if backend == "metal":
        return metal_budget_bytes(device_bytes, host.total_bytes, host.wired_bytes, process_bytes)
    return host_room_bytes(host)

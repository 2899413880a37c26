"""Published memory readings of real Macs and NVIDIA GPUs, to test the budget rule against."""

from typing import NamedTuple

MIB, GIB = 2**20, 2**30


class Reading(NamedTuple):
    """One machine as somebody published it."""

    name: str
    backend: str  # metal, cuda
    total_bytes: int
    device_bytes: int  # Metal: recommendedMaxWorkingSetSize; CUDA: total less the driver's part and other processes
    usable_bytes: int  # what one process could take there, by a published run or failure; else the working set
    wired_bytes: int = 0  # Metal, before the run


def _mac(name: str, total_gib: int, working_set: int, *, wired_gib: float = 0, usable_gib: float = 0) -> Reading:
    usable = int(usable_gib * GIB) or working_set
    return Reading(name, "metal", total_gib * GIB, working_set, usable, int(wired_gib * GIB))


def _gpu(name: str, total_mib: int, free_gib: float, allocated: float, reserved_mib: float, free_mib: float) -> Reading:
    """Usable by PyTorch's error: GiB allocated, MiB reserved but unallocated, MiB still free."""
    usable = allocated + (reserved_mib + free_mib) / 1024
    return Reading(name, "cuda", total_mib * MIB, int(free_gib * GIB), int(usable * GIB))


MACS = (  # the source of each; macOS 26 recommends more than those before
    # MakazhanAlpamys/Soup#663 trained at 5.154 GB; Ilcoach/loom llama-cpp-8b-q4-001.md stopped at 1 % free
    _mac("M1 8 GB, macOS 26.6.2", 8, 5_726_633_984, usable_gib=4.682 + 576 / 1024),
    _mac("8 GB, much wired", 8, 5_726_633_984, wired_gib=2.442),  # giampaolo/psutil#1503
    _mac("M1 16 GB, before macOS 26", 16, 11_453_251_584),  # ise-uiuc/magicoder#19: 12921 MiB failed
    _mac(
        "M4 16 GB, another model resident", 16, 11_453_251_584, wired_gib=10.24, usable_gib=4.66
    ),  # exo-explore/exo#1672
    _mac("M3 16 GB, macOS 26", 16, 12_713_115_648),  # AlexsJones/llmfit#754
    _mac("M3 Pro 18 GB, macOS 26.5", 18, 14_302_248_960),  # ml-explore/mlx-lm#1206: 7.9 GB trained
    _mac("M4 Pro 24 GB, macOS 26.5", 24, 19_069_665_280, wired_gib=3.6),  # AlexsJones/llmfit#812: 17.3 GB resident
    _mac("M1 Max 32 GB, before macOS 26", 32, 22_906_503_168),  # ggml-org/llama.cpp#2011
    _mac("M2 Pro 32 GB, macOS 26.5.2", 32, 26_800_603_136),  # raullenchai/Rapid-MLX#1636: 20 GB without swap
    _mac("M3 Max 36 GB, macOS 26", 36, 30_150_672_384),  # llama.cpp log b8981
    _mac("M5 Pro 48 GB, macOS 26.5", 48, 40_200_896_512),  # manjunathshiva/turboquant-mlx#16: 41.07 GB failed
    _mac("M1 Max 64 GB, before macOS 26", 64, 51_539_607_552),  # llama.cpp log
    _mac("M2 Max 96 GB", 96, 77_309_411_328),  # jundot/omlx#1998
    _mac("M5 Max 128 GB, macOS 26", 128, 115_448_725_504),  # antirez/ds4#909: 104.18 GiB ran, 108.01 failed
    _mac("M2 Ultra 192 GB, before macOS 26", 192, 154_618_822_656),  # ml-explore/mlx#1060
    _mac("M3 Ultra 256 GB, macOS 26", 256, 239_143_780_352),  # llama-server --list-devices
    # other programs hold memory beside the wired part; HARDWARE.md of a binned M5 Pro: 16585 MiB ran, 17361 failed
    _mac("M5 Pro 24 GB, swapping", 24, 19_069_665_280, wired_gib=3, usable_gib=16585.44 / 1024),
)
T4 = _gpu("T4 on Colab, 2026", 15360, 14.56, 13.90, 504.07, 15.81)  # Ultralytics AutoBatch log
GPUS = (
    T4,
    _gpu("T4", 15360, 14.75, 14.06, 330.42, 235.06),  # FoundationVision/GenerateU#10
    _gpu("RTX A4000", 0, 15.61, 15.01, 301.92, 82.88),  # DengKaiCQ/VGGT-Long#6
    _gpu("L4, vLLM's CI", 23034, 22.05, 21.56, 113.98, 112.12),  # vllm-project/vllm#20214
    _gpu("RTX 3090", 24576, 23.70, 22.89, 0, 120.75),  # Lightning-AI/lit-llama#137
    _gpu("RTX 4090", 24564, 23.45, 22.74, 136.85, 170.69),  # eosphoros-ai/DB-GPT-Hub#248 (QLoRA)
    _gpu("RTX 4090 with a desktop", 24564, 22.73, 21.72, 520.54, 45.06),  # pinokiofactory/flux-webui#11
    _gpu("RTX 5090", 32607, 31.37, 30.74, 19.41, 15.88),  # Wan-Video/Wan2.1#465
    _gpu("A100 40 GB", 40960, 39.50, 12.87, 912.01, 25.24 * 1024),  # TianheWu/CoSeR#10
    _gpu("H100 80 GB", 81559, 79.18, 72.50, 3.76 * 1024, 2.17 * 1024),  # GPT-2 large batch probe on Nebius
    _gpu("H200", 0, 139.72, 138.14, 824.86, 114.69),  # PyTorch error on an H200 of 139.72 GiB
)

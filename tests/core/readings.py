"""Published memory readings of real Macs and NVIDIA GPUs, to test the budget rule against."""

from dataclasses import dataclass

GB = 10**9
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Reading:
    """One machine as somebody published it; 0 where the source does not say."""

    name: str
    backend: str  # metal, cuda
    total_bytes: int
    working_set_bytes: int  # Metal: recommendedMaxWorkingSetSize
    wired_bytes: int  # Metal, before the run
    free_bytes: int  # CUDA: total less the driver's part and other processes
    usable_bytes: int  # what one process could take there, by a published run or failure; else the working set
    source: str


def _mac(name: str, total_gib: int, working_set: int, source: str, *, wired: float = 0, usable: float = 0) -> Reading:
    """A Mac; without a published bound what Metal recommends is what is usable."""
    return Reading(name, "metal", total_gib * GIB, working_set, int(wired), 0, int(usable) or working_set, source)


def _gpu(name: str, total_mib: int, free_gib: float, usable_gib: float, source: str) -> Reading:
    """An NVIDIA GPU; total as nvidia-smi gives it, 0 where no page of that machine does."""
    return Reading(name, "cuda", total_mib * MIB, 0, 0, int(free_gib * GIB), int(usable_gib * GIB), source)


def _room(allocated_gib: float, reserved_mib: float, free_mib: float) -> float:
    """GiB that one process could allocate, from PyTorch's error: allocated, reserved but unallocated, still free."""
    return allocated_gib + (reserved_mib + free_mib) / 1024


# Exact where a page gives bytes; else the printed MB, in whole pages of 16 KiB.
WORKING_SET_8 = 5_726_633_984  # two thirds, on every macOS
WORKING_SET_16, WORKING_SET_16_MACOS_26 = 11_453_251_584, 12_713_115_648
WORKING_SET_18_MACOS_26 = 14_302_248_960
WORKING_SET_24, WORKING_SET_24_MACOS_26 = 17_179_885_568, 19_069_665_280
WORKING_SET_32, WORKING_SET_32_MACOS_26 = 22_906_503_168, 26_800_603_136
WORKING_SET_36, WORKING_SET_36_MACOS_26 = 28_991_029_248, 30_150_672_384
WORKING_SET_48, WORKING_SET_48_MACOS_26 = 38_654_705_664, 40_200_896_512
WORKING_SET_64, WORKING_SET_64_MACOS_26 = 51_539_607_552, 55_662_788_608
WORKING_SET_96 = 77_309_411_328
WORKING_SET_128, WORKING_SET_128_MACOS_26 = 103_079_215_104, 115_448_725_504
WORKING_SET_192 = 154_618_822_656
WORKING_SET_256_MACOS_26 = 239_143_780_352

MACS = (
    _mac(
        "M1 8 GB, macOS 26.6.2",
        8,
        WORKING_SET_8,
        "MakazhanAlpamys/Soup#663 (trained at 5.154 GB); Ilcoach/loom llama-cpp-8b-q4-001.md (stopped at 1 % free)",
        usable=4.682 * GIB + 576 * MIB,  # Qwen3-8B Q4_K_M and its 4096 tokens of context: this was too much
    ),
    _mac("A18 Pro 8 GB, macOS 26.5.1", 8, WORKING_SET_8, "mlx device_info of Mac17,5 in a published benchmark JSON"),
    _mac(
        "8 GB, much wired",
        8,
        WORKING_SET_8,  # of the other 8 GB Macs: this page gives total and wired
        "giampaolo/psutil#1503",
        wired=2_622_050_304,
    ),
    _mac("M1 16 GB, before macOS 26", 16, WORKING_SET_16, "ise-uiuc/magicoder#19 (12921 MiB failed)"),
    _mac("16 GB, much wired", 16, WORKING_SET_16, "psutil tutorial, svmem(total=17179869184)", wired=5_663_596_544),
    _mac(
        "M4 16 GB, macOS 15.6, another model resident",
        16,
        WORKING_SET_16,
        "exo-explore/exo#1672 (11 GB wired, less than 5 GB left)",
        wired=11 * GB,
        usable=5 * GB,
    ),
    _mac("M3 16 GB, macOS 26", 16, WORKING_SET_16_MACOS_26, "AlexsJones/llmfit#754 (11.84 of 16 GiB)"),
    _mac("M3 Pro 18 GB, macOS 26.5", 18, WORKING_SET_18_MACOS_26, "ml-explore/mlx-lm#1206 (7.9 GB trained)"),
    _mac("M4 24 GB, before macOS 26", 24, WORKING_SET_24, "mlx device_info of an M4 with 25769803776 bytes"),
    _mac(
        "M4 Pro 24 GB, macOS 26.5",
        24,
        WORKING_SET_24_MACOS_26,
        "john-rocky/apple-silicon-llm-bench#7 (2026-09-18); AlexsJones/llmfit#812 (17.3 GB resident)",
        wired=3.6 * GIB,
    ),
    _mac("M1 Max 32 GB, before macOS 26", 32, WORKING_SET_32, "ggml-org/llama.cpp#2011 (a hard limit there)"),
    _mac("M1 Max 32 GB, macOS 26", 32, WORKING_SET_32_MACOS_26, "ollama/ollama#16030"),
    _mac("M2 Pro 32 GB, macOS 26.5.2", 32, WORKING_SET_32_MACOS_26, "raullenchai/Rapid-MLX#1636 (20 GB, no swap)"),
    _mac("M4 Max 36 GB, before macOS 26", 36, WORKING_SET_36, "llama.cpp log b7690 of an M4 Max, 28991.03 MB"),
    _mac("M3 Max 36 GB, macOS 26", 36, WORKING_SET_36_MACOS_26, "llama.cpp log b8981 of an M3 Max, 28753 MiB"),
    _mac("M3 Max 48 GB, before macOS 26", 48, WORKING_SET_48, "llama.cpp log of an M3 Max, 38654.71 MB"),
    _mac("M4 Pro 48 GB, macOS 26", 48, WORKING_SET_48_MACOS_26, "mlx device_info of an M4 Pro with 51539607552 bytes"),
    _mac(
        "M5 Pro 48 GB, macOS 26.5",
        48,
        WORKING_SET_48_MACOS_26,
        "manjunathshiva/turboquant-mlx#16 (41.07 GB failed); ggml-org/llama.cpp#16634 (40200.90 MB)",
    ),
    _mac("M1 Max 64 GB, before macOS 26", 64, WORKING_SET_64, "llama.cpp log of an M1 Max, 51539.61 MB"),
    _mac("M3 Max 64 GB, macOS 26.4.1", 64, WORKING_SET_64_MACOS_26, "Qwen 3.6 + TurboQuant on M3 Max 64 GB, results"),
    _mac("M2 Max 96 GB", 96, WORKING_SET_96, "jundot/omlx#1998; ggml-org/llama.cpp#3213 (73728 MiB)"),
    _mac("M3 Max 128 GB, before macOS 26", 128, WORKING_SET_128, "ml-explore/mlx-examples#1076 (121.55 GB crashed)"),
    _mac("M5 Max 128 GB, macOS 26", 128, WORKING_SET_128_MACOS_26, "antirez/ds4#909 (104.18 GiB ran, 108.01 failed)"),
    _mac("M2 Ultra 192 GB, before macOS 26", 192, WORKING_SET_192, "ml-explore/mlx#1060 (by max_buffer_length)"),
    _mac("M3 Ultra 256 GB, macOS 26", 256, WORKING_SET_256_MACOS_26, "llama-server --list-devices, 228065 MiB"),
)

GPUS = (
    _gpu("RTX 3050 6 GB, with a desktop", 6144, 5699 / 1024, 5158 / 1024, "SurfSense local models, measurements"),
    _gpu("T4", 15360, 14.75, _room(14.06, 330.42, 235.06), "FoundationVision/GenerateU#10"),
    _gpu("T4 on Colab, 2026", 15360, 14.56, _room(13.90, 504.07, 15.81), "Ultralytics AutoBatch log, Tesla T4 14.56G"),
    _gpu("one of four T4", 15360, 14.57, _room(10.23, 44.39, 4.17 * 1024), "QwenLM/Qwen3-VL#1046"),
    _gpu("RTX A4000", 0, 15.61, _room(15.01, 301.92, 82.88), "DengKaiCQ/VGGT-Long#6"),
    _gpu("L4", 23034, 21.95, _room(21.24, 355.20, 154.12), "Lightricks/LTX-Video#9"),
    _gpu("L4, vLLM's CI", 23034, 22.05, _room(21.56, 113.98, 112.12), "vllm-project/vllm#20214"),
    _gpu("RTX 3090", 24576, 23.70, _room(22.89, 0, 120.75), "Lightning-AI/lit-llama#137"),
    _gpu("RTX 4090", 24564, 23.64 - 0.19, _room(22.74, 136.85, 170.69), "eosphoros-ai/DB-GPT-Hub#248 (QLoRA)"),
    _gpu("RTX 4090, LoRA", 24564, 23.55, _room(22.72, 257.71, 45.75), "huggingface/lora-fast#1"),
    _gpu("RTX 4090 with a desktop", 24564, 23.61 - 0.88, _room(21.72, 520.54, 45.06), "pinokiofactory/flux-webui#11"),
    _gpu("RTX 5090", 32607, 31.37, _room(30.74, 19.41, 15.88), "Wan-Video/Wan2.1#465"),
    _gpu(
        "RTX 5090, another run",
        32607,
        31.36,
        _room(25.95, 343.86, 4.45 * 1024),
        "TrajectoryCrafter/TrajectoryCrafter#20",
    ),
    _gpu("A100 40 GB", 40960, 39.50, _room(12.87, 912.01, 25.24 * 1024), "TianheWu/CoSeR#10"),
    _gpu("RTX 6000 Ada", 46068, 44.43, _room(43.94, 41.95, 19.00), "DINGYANB/MTVCrafter#21"),
    _gpu("A100 80 GB, shared", 81920, 79.14 - 11.29, _room(8.27, 500.38, 58.59 * 1024), "lianqi1008/Control-GIC#6"),
    _gpu(
        "H100 80 GB",
        81559,
        79.18,
        _room(72.50, 3.76 * 1024, 2.17 * 1024),
        "GPT-2 Large batch probe on Nebius, 4 x H100",
    ),
    _gpu("H200", 0, 139.72, _room(138.14, 824.86, 114.69), "PyTorch error on an H200 of 139.72 GiB"),
)

# Macs on which other programs held memory beside the wired part: working set and wired memory do not show it.
PRESSED_MACS = (
    _mac(
        "M5 Pro 24 GB, macOS 26.5, swapping",
        24,
        WORKING_SET_24_MACOS_26,
        "HARDWARE.md of a binned M5 Pro (16585 MiB at full speed, 16841 starved, 17361 failed)",
        wired=3 * GIB,
        usable=16585.44 * MIB,
    ),
    _mac(
        "M4 Pro 24 GB, 9.8 GiB in the compressor",
        24,
        WORKING_SET_24_MACOS_26,
        "john-rocky/apple-silicon-llm-bench#7 (2026-09-09: 11.3 GB did not fit)",
        wired=3.5 * GIB,
        usable=10.7 * GIB,
    ),
)

READINGS = MACS + GPUS

"""What the report's figures mean: each assumption is ok, wrong, or cannot be seen on this machine."""

from collections.abc import Callable

from safetrain.core.memory.budget import DeviceMemory, budget_bytes
from safetrain.core.protocol.selftest import DirtyPages, Exactness, Flushes, Kernels, ProcessMemory, Timed, UpdateCost
from safetrain.plan.machine import PROCESS_GROWTH_BYTES
from safetrain.plan.report import INTERRUPTED, Report
from safetrain.plan.selftest import largest_difference

OK, WRONG, NOT_HERE = "ok", "wrong", "not here"
NOISE = 1.25  # between two timings of the same
SLOWEST_LIST = 2.0  # times a batch: a weight that is read once per token costs 16 and more
SLOWEST_BFLOAT16 = 2.0  # times float16's
FUSED_SHARE = 0.5  # of the unfused peak: below it no score of all pairs is kept
LONG_ROW_GROWTH = 6.0  # of the peak, for four times the tokens: sixteen if scores of all pairs are kept
LEAST_SHARE, CALM_FREE_PERCENT = 0.55, 50  # of Metal's working set, while half of the memory is free
SLOWEST_FLUSH_SECONDS = 0.5


def verdicts(report: Report) -> dict[str, str]:
    """By assumption, in the order of the report."""
    rules: dict[str, tuple[str, Callable[[Report], bool | None]]] = {
        "budget": ("device", _budget),
        "products": ("products", _products),
        "bfloat16": ("products", _bfloat16),
        "attention": ("attention", _attention),
        "long rows": ("rows", _long_rows),
        "kernels": ("kernels", _kernels),
        "exact": ("exactness", lambda report: _exact(report, "exactness")),
        "exact model": ("model", lambda report: _exact(report, "model")),
        "speed": ("mlx_lm", _speed),
        "peak": ("mlx_lm", _peak),
        "process": ("update", _process),
        "make": ("", lambda report: None if report.system.make is None else report.system.make.by_path),
        "full flush": ("files", _full_flush),
        "mapped pages": ("files", _pages),
        "jetsam": ("", lambda report: None if report.system.jetsam is None else report.system.jetsam.readable),
    }
    return {name: _word(report, section, rule) for name, (section, rule) in rules.items()}


def budget_of(report: Report) -> int | None:
    """What a training may take by our rule, in bytes; None without a device."""
    device = report.device
    if device is None:
        return None
    asked = DeviceMemory(device.backend, device.working_set_bytes, device.free_bytes)
    return budget_bytes(asked, report.system.memory, device.process_bytes)


def allowed_process_bytes(report: Report) -> int:
    """What a plan leaves to a process beside mlx."""
    return 0 if report.device is None else report.device.process_bytes + PROCESS_GROWTH_BYTES


def _word(report: Report, section: str, rule: Callable[[Report], bool | None]) -> str:
    """A section whose process died is wrong; one that was interrupted or never begun is not here."""
    ended = report.sections[section].ended if section in report.sections else ""
    if ended:
        return NOT_HERE if ended == INTERRUPTED else WRONG
    found = rule(report)
    return NOT_HERE if found is None else OK if found else WRONG


def _on_gpu(report: Report) -> bool:
    return report.device is not None and report.device.backend != "cpu"


def _timed(report: Report, section: str) -> dict[str, Timed]:
    return {timed.name: timed for timed in report.all(section, Timed)}


def _budget(report: Report) -> bool | None:
    """No more than the system says is there; on a calm Mac most of what Metal recommends."""
    budget, device, memory = budget_of(report), report.device, report.system.memory
    if budget is None or device is None:
        return None
    if device.backend == "cuda":
        return 0 < budget <= device.free_bytes
    if device.backend == "cpu":
        return 0 < budget <= memory.available_bytes
    is_calm = memory.pressure_level == 1 and memory.free_percent >= CALM_FREE_PERCENT
    least = LEAST_SHARE * device.working_set_bytes if is_calm else 1
    return least <= budget <= device.working_set_bytes + device.process_bytes


def _products(report: Report) -> bool | None:
    """Flattened to two dimensions, as a list of tokens is multiplied, a product is as fast as one of a batch.

    Not on a CPU, where weights are dequantized first.
    """
    found = _timed(report, "products")
    batch, flat = found.get("(1,T,width)"), found.get("(T,width)")
    if batch is None or flat is None or not _on_gpu(report):
        return None
    return not batch.failed and not flat.failed and flat.seconds <= SLOWEST_LIST * batch.seconds


def _bfloat16(report: Report) -> bool | None:
    found = _timed(report, "products")
    half, brain = found.get("float16"), found.get("bfloat16")
    if half is None or brain is None or not _on_gpu(report):
        return None
    return not brain.failed and brain.seconds <= SLOWEST_BFLOAT16 * half.seconds


def _attention(report: Report) -> bool | None:
    """mlx's causal attention keeps no score of all pairs: forward on Metal, on CUDA with its gradient."""
    if report.device is None or not _on_gpu(report):
        return None
    found, way = _timed(report, "attention"), "gradient" if report.device.backend == "cuda" else "forward"
    causal, unfused = found.get(f"causal 2048 {way}"), found.get(f"unfused 2048 {way}")
    if causal is None or unfused is None:
        return None
    return not causal.failed and (bool(unfused.failed) or causal.peak_bytes <= FUSED_SHARE * unfused.peak_bytes)


def _long_rows(report: Report) -> bool | None:
    costs = report.all("rows", UpdateCost)
    if len(costs) < 2:
        return None
    short, long = (cost.peak_bytes - cost.still_bytes for cost in costs)
    return long <= LONG_ROW_GROWTH * short


def _kernels(report: Report) -> bool | None:
    found = report.all("kernels", Kernels)
    if not found or not _on_gpu(report):
        return None
    return found[0].gradient + found[0].optimizer <= found[0].mlx_lm


def _exact(report: Report, section: str) -> bool | None:
    """Loss and gradient are those of mlx-lm's own layers."""
    found = report.all(section, Exactness)
    return all(_is_exact(line) for line in found) if found else None


def _is_exact(line: Exactness) -> bool:
    most = largest_difference(in_float32=line.in_float32, on_cpu=line.on_cpu)
    return line.loss_difference <= most and line.gradient_difference <= most


def _speed(report: Report) -> bool | None:
    """On a GPU: a CPU is compared with quantized weights, for minutes (benchmarks/bench_throughput)."""
    if not _on_gpu(report):
        return None
    costs = report.all("update", UpdateCost) + report.all("mlx_lm", UpdateCost)
    return costs[0].seconds <= NOISE * costs[1].seconds if len(costs) == 2 else None


def _peak(report: Report) -> bool | None:
    costs = report.all("update", UpdateCost) + report.all("mlx_lm", UpdateCost)
    return costs[0].peak_bytes <= costs[1].peak_bytes if len(costs) == 2 else None


def _process(report: Report) -> bool | None:
    found = report.all("update", ProcessMemory)
    if not found or report.device is None:
        return None
    return beside_mlx_bytes(found[0]) <= allowed_process_bytes(report)


def beside_mlx_bytes(memory: ProcessMemory) -> int:
    """What a process takes that mlx's allocator does not see."""
    return max(0, memory.footprint_bytes - memory.mlx_active_bytes - memory.mlx_cache_bytes)


def _full_flush(report: Report) -> bool | None:
    found = report.all("files", Flushes)
    if not found or not report.system.is_macos:
        return None
    return found[0].full_seconds is not None and found[0].full_seconds <= SLOWEST_FLUSH_SECONDS


def _pages(report: Report) -> bool | None:
    """msync, which the flight recorder's reader uses, leaves no page to be lost."""
    found = report.all("files", DirtyPages)
    return None if not found or not found[0].written else not found[0].msync

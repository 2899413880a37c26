"""What mlx may take, told before the model is loaded. No backend refuses more: mlx waits for running work and frees.

On CPU mlx allocates up to a hundred operations ahead of what is computed. Told to keep to the predicted peak it waits
instead, oversteps by one allocation, and loses next to no time (measured: benchmarks/bench_memory_accuracy).
"""

import mlx.core as mx

LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 2**28, 2**31  # of freed buffers that are kept; unlimited, they grow to all memory
WIRED_ABOVE_PEAK, WIRED_SHARE = 1.1, 0.9  # of the prediction, and of what Metal recommends at most


def set_limits(budget_bytes: int, predicted_peak_bytes: int, told_bytes: int) -> None:
    """Memory, cache and wired limits from the plan. On CPU the cache stays at mlx's own 32 MiB, as it was measured.

    Wired memory is a seventh faster on Metal (mlx #2006), and the system is the worse for it when too much is wired.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        mx.set_memory_limit(told_bytes)
        return
    mx.set_memory_limit(budget_bytes)
    mx.set_cache_limit(min(MOST_CACHE_BYTES, max(LEAST_CACHE_BYTES, budget_bytes - predicted_peak_bytes)))
    most_wired = int(WIRED_SHARE * int(mx.device_info().get("max_recommended_working_set_size", 0)))
    if most_wired:  # Metal
        mx.set_wired_limit(min(most_wired, int(WIRED_ABOVE_PEAK * predicted_peak_bytes)))

"""What mlx may take, set before the model is loaded. It is advice: mlx waits and frees, and no backend refuses."""

import mlx.core as mx

LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 2**28, 2**31  # of freed buffers that are kept; unlimited, they grow to all memory
WIRED_ABOVE_PEAK, WIRED_SHARE = 1.1, 0.9  # of the prediction, and of what Metal recommends at most


def set_limits(budget_bytes: int, predicted_peak_bytes: int) -> None:
    """Memory, cache and wired limits from the plan. On CPU the cache stays at mlx's own 32 MiB, as it was measured.

    Evaluation waits for running work above the memory limit; wired memory is a seventh faster on Metal (mlx #2006), and
    the system is the worse for it when too much is wired.
    """
    mx.set_memory_limit(budget_bytes)
    if mx.default_device().type == mx.DeviceType.cpu:
        return
    mx.set_cache_limit(min(MOST_CACHE_BYTES, max(LEAST_CACHE_BYTES, budget_bytes - predicted_peak_bytes)))
    most_wired = int(WIRED_SHARE * int(mx.device_info().get("max_recommended_working_set_size", 0)))
    if most_wired:  # Metal
        mx.set_wired_limit(min(most_wired, int(WIRED_ABOVE_PEAK * predicted_peak_bytes)))

"""How fast a machine trains, as far as it is known, and from where."""

from dataclasses import dataclass

from safetrain.core.errors import ConfigError
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine
from safetrain.core.records.settings import Recommendation, read_recommendation
from safetrain.core.storage import paths
from safetrain.plan.what_if import PROFILES, Profile

CPU_SHARE = 0.5  # of the speed of a matrix product, in training (measured: benchmarks/bench_throughput, 0.4 to 0.6)
MEASURE = "to measure it: python -m stages.recommend_config"


@dataclass(frozen=True)
class Speed:
    """What is known of a machine's speed; both None: nothing."""

    tflops: float | None  # 10^12 operations a second
    source: str
    step_seconds: float | None = None  # of an update, measured for this very training
    rows: int = 0  # of that update
    length: int = 0  # tokens of its rows, at the most


def speed_of_profile(profile: Profile) -> Speed:
    """By conf/machine."""
    where = PROFILES / f"{profile.name}.yaml"
    if profile.tflops is None:
        return Speed(None, f"not known: no tflops in {where}")
    return Speed(profile.tflops, f"assumed: {profile.tflops:g} TFLOP/s, {where}")


def speed_here(model: ModelFiles, machine: Machine, method: str) -> Speed:
    """By a dry run of this model and method, where there was one; else by the speed of a matrix product on a CPU."""
    recommended = _recommended()
    if recommended is not None and recommended.step_seconds is not None:
        planned = (recommended.planned_model, recommended.planned_method, recommended.planned_backend)
        if planned == (str(model.folder), method, machine.backend):
            rows = recommended.batch_size * recommended.gradient_accumulation
            source = f"measured: {recommended.step_seconds:.3g} s an update of {rows} rows, a dry run"
            return Speed(None, source, recommended.step_seconds, rows, recommended.max_seq_length)
    if tflops := assumed_tflops(machine):
        source = f"assumed: {tflops:.2g} TFLOP/s, half of the speed of a matrix product that preflight measured"
        return Speed(tflops, f"{source}; {MEASURE}")
    return Speed(None, f"not known; {MEASURE}")


def assumed_tflops(machine: Machine) -> float | None:
    """10^12 operations a second of a training, by what preflight measured; None: not known."""
    if machine.backend != "cpu" or not machine.gemm_gflops:
        return None
    return CPU_SHARE * machine.gemm_gflops / 1000


def _recommended() -> Recommendation | None:
    try:
        return read_recommendation(paths.RECOMMENDED_CONFIG)
    except ConfigError:
        return None

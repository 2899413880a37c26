"""How long dry runs take, and whether another one pays: planning must cost less than it saves."""

from collections.abc import Callable

from safetrain.core.memory.terms import backend_of, base_bytes
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine
from safetrain.core.records.settings import DRY_RUN_SLOW_SECONDS, DRY_RUN_TIMED_SECONDS
from safetrain.plan.candidates import Fit

LEAST_SECONDS, SHARE = 60.0, 0.03  # planning may take this long, or this share of the training if that is longer
MOST_FIRST_SECONDS = 300.0  # for the first dry run, where a smaller micro-batch would take less
PREFLIGHT_SECONDS, START_SECONDS = 6.0, 2.0  # preflight's own time, and what a process needs until mlx is loaded
LOAD_BYTES_PER_SECOND = 0.5e9  # of the base as it is kept in memory (Linux CPU)
FLOPS_PER_WEIGHT = 4  # and token: one product forward, one backward; weights of the base get no gradient
ATTAINED = 0.5  # a training's share of the speed of a large product (measured: benchmarks/bench_throughput)
VALIDATED = 0.5  # validating takes this share of a largest update
MOST_LARGEST = 2  # largest updates, usually, where they are not slow (engine/dry_run.py)
UNCERTAIN = 1.1  # predicted ratios of speed are a tenth off
LIKELY = 0.5  # half of the saving that is then possible is likely


class PlanningTime:
    """How long dry runs of one model take, and how much time planning has spent."""

    def __init__(self, machine: Machine, model: ModelFiles) -> None:
        self._machine, self._model = machine, model
        self._spent = PREFLIGHT_SECONDS
        self._correction = 1.0  # measured seconds over expected seconds

    def of_next(self, fit: Fit) -> float | None:
        """Expected of a dry run; None where the machine's speed is not known."""
        work = self._work_seconds(fit)
        return None if work is None else self._correction * (START_SECONDS + self._load_seconds(fit) + work)

    def took(self, fit: Fit, seconds: float, *, ended_well: bool) -> None:
        """Count a dry run, and learn from one that went to its end."""
        self._spent += seconds
        expected = self.of_next(fit)
        if expected and ended_well:
            self._correction *= seconds / expected

    def pays(self, ratio: float, training_seconds: float | None, seconds: float | None) -> bool:
        """Whether a dry run of ``seconds`` pays, for a candidate whose cost is ``ratio`` times that of the best so far.

        It must be likely to save more than it takes, and planning must stay within its share of the training.
        """
        if training_seconds is None or seconds is None:
            return False
        likely = LIKELY * (1 - ratio / UNCERTAIN) * training_seconds
        return seconds < likely and self._spent + seconds <= max(LEAST_SECONDS, SHARE * training_seconds)

    def affordable_first(self, fits: list[Fit], updates_of: Callable[[Fit], int]) -> list[Fit]:
        """The same order, but with those at the end whose dry run alone would take more than planning may: a smaller
        micro-batch gives an answer in less time."""

        def too_long(fit: Fit) -> bool:
            seconds, update = self.of_next(fit), self._update_seconds(fit)
            if seconds is None or update is None:
                return False
            return self._spent + seconds > max(LEAST_SECONDS, min(MOST_FIRST_SECONDS, SHARE * update * updates_of(fit)))

        late = [fit for fit in fits if too_long(fit)]
        return [fit for fit in fits if fit not in late] + sorted(late, key=lambda fit: self.of_next(fit) or 0.0)

    def _load_seconds(self, fit: Fit) -> float:
        backend = backend_of(self._model, self._machine.backend, fit.candidate.mode.dequantize_base)
        return base_bytes(self._model, backend) / LOAD_BYTES_PER_SECOND

    def _work_seconds(self, fit: Fit) -> float | None:
        """Seconds of the largest updates (only one where they are slow), of validating, and of a few usual updates."""
        rate, update = self._tokens_per_second(fit), self._update_seconds(fit)
        if rate is None or update is None:
            return None
        largest = fit.shape.total / rate
        timed = 0.0 if update > DRY_RUN_SLOW_SECONDS else max(DRY_RUN_TIMED_SECONDS, update)
        return largest * (1 if largest > DRY_RUN_SLOW_SECONDS else MOST_LARGEST) + VALIDATED * largest + timed

    def _update_seconds(self, fit: Fit) -> float | None:
        rate = self._tokens_per_second(fit)
        return None if rate is None else fit.update_tokens / rate

    def _tokens_per_second(self, fit: Fit) -> float | None:
        if not self._machine.gemm_gflops:
            return None
        operations = FLOPS_PER_WEIGHT + 2 * fit.candidate.mode.checkpointing
        return ATTAINED * self._machine.gemm_gflops * 1e9 / (operations * self._model.parameters)

"""Stage 4: fine-tune the base model on data/validated with the recommended configuration and your settings.

Training runs in a separate process that may die; this process watches it and never loads mlx.
"""

import sys

from safetrain.core.events import Event
from safetrain.core.hosts import HOSTS_FILE, hosts_of
from safetrain.core.lock import training_lock
from safetrain.core.records.metrics import TrainingSummary
from safetrain.core.records.reports import DataReport, require_data_of
from safetrain.core.records.schema import Pipeline
from safetrain.core.records.settings import Recommendation, job_of, require_plan_for
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_result
from safetrain.core.storage.paths import FLIGHT
from safetrain.guard.keep_going import keep_going
from safetrain.guard.process import WatchSettings
from safetrain.stage import stage
from safetrain.watch.progress import TrainProgress, show_end, still_working

WORKER = (sys.executable, "-m", "safetrain.engine.worker")
LAUNCHER = (sys.executable, "-m", "safetrain.engine.child_process")


@stage
def main(config: Pipeline) -> None:
    """Train, or resume an unfinished run with the same settings."""
    train = config.train
    with training_lock(paths.OUTPUT) as locks:
        plan = read_result(paths.RECOMMENDED_CONFIG, Recommendation)
        require_plan_for(plan, train.method, config.model.path)
        require_data_of(read_result(paths.DATA_REPORT, DataReport), config.data.path)
        hosts = hosts_of(train.ranks)
        job = job_of(train, config.lora, plan, hosts)
        watch = WatchSettings(
            WORKER,
            paths.OUTPUT / FLIGHT,
            job.memory_limit_bytes,
            60 * train.hang_minutes,
            locks,
            ranks=job.ranks,
            backend=job.rank_backend,
            hostfile=None if hosts.all_here else HOSTS_FILE,
            launcher=LAUNCHER,
        )
        progress = TrainProgress()
        with still_working("training") as before_a_line:

            def show(event: Event) -> None:
                before_a_line()
                progress.show(event)

            keep_going(job, watch, plan, show)
    show_end(read_result(paths.SUMMARY, TrainingSummary))


if __name__ == "__main__":
    main()

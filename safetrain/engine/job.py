"""A training job and everything read before mlx loads: model headers, rows, predicted memory."""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.training_rows import TrainingRows, largest_update, load_training_rows, order_fingerprint
from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted, rows_text, size_text
from safetrain.core.memory.estimate import RunMemory, in_rectangles, memory_of_run, require_fit
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import start_of, starting_point
from safetrain.core.records.run_state import RunIdentity, searched
from safetrain.core.records.schema import PAIRED, PRETRAIN
from safetrain.core.records.settings import (
    Shape,
    TrainJob,
    identity_of,
    require_short_warmup,
    total_updates,
    usual_warmup,
)
from safetrain.core.storage import paths


@dataclass(frozen=True, kw_only=True)
class Job(TrainJob):
    """The supervisor's job, with what is read before mlx loads, and the output folders.

    A recommended warm-up is shortened to suit the length of this run.
    """

    rows: TrainingRows  # truncated to max_seq_length
    identity: RunIdentity
    files: ModelFiles
    output: Path = paths.OUTPUT  # checkpoints and training_state.json
    adapters: Path = paths.BEST_ADAPTER  # the best adapter so far
    kept: Path | None = None  # has the same checkpoints, where DVC may delete ``output``
    candidate: Path | None = None  # folder of a search with this run's beginning

    @property
    def bits_per_byte_of_nat(self) -> float:
        """Factor from nats per token to bits per byte, which pretraining reports; 0 for other methods."""
        return self.rows.bits_per_byte_of_nat if self.settings.method == PRETRAIN else 0.0

    @property
    def updates(self) -> int:
        settings = self.settings
        return total_updates(len(self.rows.train), settings.rows_per_update, settings.num_epochs, settings.max_steps)

    @property
    def tokens(self) -> int:
        return int(self.updates * self.settings.rows_per_update * self.rows.train.inputs().mean())


def load_job(asked: TrainJob) -> Job:
    """Read model headers and map the rows. Raises SafetrainError if the model or the rows cannot be used."""
    base, settings = Path(asked.base), asked.settings
    files = read_model_files(base)
    rows = load_training_rows(base, settings.max_examples, settings.method)
    rows = rows.at_length(settings.max_seq_length, settings.method, settings.valid_tokens)
    updates = total_updates(len(rows.train), settings.rows_per_update, settings.num_epochs, settings.max_steps)
    if asked.warmup_is_recommended:  # the plan may have been for a longer run
        settings = dataclasses.replace(settings, warmup_steps=min(settings.warmup_steps, usual_warmup(updates)))
    require_short_warmup(settings.warmup_steps, updates)
    start = start_of(settings.from_adapter)
    if asked.planned is not None and asked.planned.start != start:
        what = "The recommended configuration is for another train.from_adapter, or it has changed since."
        do = "run preflight and recommend_config again, with the same overrides"
        raise ConfigError(what, where=settings.from_adapter or "train.from_adapter=null", do=do)
    digests = starting_point(files.fingerprint, start), rows.train_digest, rows.valid_digest
    identity = RunIdentity(*digests, identity_of(settings), order_fingerprint())
    kept = paths.kept_runs(Path.cwd())
    if kept is not None:
        kept /= hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
    output = Path(asked.folder)
    places = {"output": output, "adapters": output / paths.UNFINISHED / paths.ADAPTERS.name, "kept": kept}
    candidate = searched(identity) if output == paths.OUTPUT else None
    facts = {**vars(asked), "settings": settings, **places, "candidate": candidate}
    return Job(**facts, rows=rows, identity=identity, files=files)


def own_largest_update(job: Job, backend_name: str) -> Shape:
    """The largest update of the run, with rows in the order that the run's seed gives."""
    settings = job.settings
    return largest_update(
        job.rows.train,
        job.rows.valid,
        settings.rows_per_update,
        settings.num_epochs,
        settings.max_steps,
        seeds=(settings.seed,),
        rectangles=in_rectangles(job.files, backend_name),
    )


def memory_of(job: Job, backend_name: str) -> RunMemory:
    """Predict the run's memory. Raises MachineError when it exceeds the budget."""
    largest = own_largest_update(job, backend_name)
    memory = memory_of_run(job.files, job.settings, largest, backend_name, job.memory_budget, job.planned)
    if not job.rungs:  # after an out-of-memory retry the retries decide
        require_fit(memory, job.settings, largest, job.memory_budget)
    return memory


def describe(job: Job, predicted_bytes: int) -> str:
    """Describe the run before its first step."""
    settings = job.settings
    layers = f"the top {counted(settings.lora.num_layers, 'block')}"
    adapter = f"{settings.method} of rank {settings.lora.rank} on {layers}"
    trained = {PRETRAIN: "all weights", "full": f"all weights of {layers}"}.get(settings.method, adapter)
    trained += f", beginning with {settings.from_adapter}" if settings.from_adapter else ""
    trained += ", the base read from disk block by block" if settings.stream_base else ""
    pairs = " (two rows are a pair)" if settings.method in PAIRED else ""
    shared = f" shared by {job.ranks} ranks" if job.ranks > 1 else ""
    return (
        f"training on {rows_text(len(job.rows.train), settings.method)}: "
        f"{settings.batch_text} rows per update{pairs}{shared}, {counted(job.updates, 'update')}; "
        f"{settings.recipe}; {trained}; "
        f"predicted peak of mlx {size_text(predicted_bytes)}"
    )

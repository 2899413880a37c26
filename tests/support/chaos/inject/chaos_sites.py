"""Where a training process can be hit: functions of the engine by the name under which they are called."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """One function, and the phase that it is called in unless a function around it decides."""

    name: str
    module: str
    attribute: str  # in the module that calls it; with a dot: a method, or a function of an imported module
    phase: str
    calls: int = 1  # of which one is hit


RUN, STATE = "safetrain.engine.run", "safetrain.engine.state"
UPDATE, TRAINING = "safetrain.engine.update", "safetrain.engine.training"
SITES = (
    Site("read rows", "safetrain.core.data.training_rows", "load_training_rows", "load data"),
    Site("load BLAS", "safetrain.engine.cpu.blas", "load_fast_blas", "load model"),
    Site("open base", UPDATE, "open_base", "load model"),
    Site("add adapters", UPDATE, "make_trainable", "load model"),
    Site("begin", RUN, "_begin", "resume"),
    Site("read checkpoint", RUN, "load_checkpoint", "resume"),
    Site("discard", RUN, "discard_run", "resume"),
    Site("micro-batch", UPDATE, "Gradients._of_micro_batch", "gradient", 7),
    Site("measure", TRAINING, "measure", "gradient", 7),
    Site("update", TRAINING, "apply_gradient", "optimizer", 7),
    Site("validate", TRAINING, "row_losses", "evaluate", 2),
    Site("keep best", TRAINING, "save_best", "evaluate"),
    Site("save", TRAINING, "save_checkpoint", "save", 2),
    Site("write arrays", STATE, "save_arrays", "save", 6),
    Site("manifest", STATE, "write_manifest", "save", 2),
    Site("rename", "safetrain.core.storage.files", "replace_directory", "save", 2),
    Site("pointer", STATE, "write_record", "save", 2),
    Site("prune", STATE, "shutil.rmtree", "save"),
    Site("open adapter", "safetrain.engine.tuned", "adapt_for_a_consumer", "load model"),
    Site("check adapter", "safetrain.engine.tuned", "TunedModel.likeness_of", "verify"),
    Site("write metrics", "safetrain.core.storage.files", "write_record", "finish"),
    Site("replace results", "safetrain.core.results", "publish", "finish"),
)
OF_RANKS = (  # where there are several
    Site("sum", "safetrain.engine.ranks", "mx.distributed.all_sum", "exchange", 9),
    Site("gather", "safetrain.engine.ranks", "mx.distributed.all_gather", "exchange", 4),
)
PHASES = tuple(dict.fromkeys(site.phase for site in SITES))

"""Merges an adapter into its base: in the base's bits, in 8 bits or in float, whichever first keeps its improvement."""

import gc
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetrain.core.errors import ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import read_prompt_format, require_base, write_prompt_format
from safetrain.core.records.fusing import REPORT, ExportReport
from safetrain.core.storage.files import full_disk_named, replace_directory, require_new, require_room, write_record
from safetrain.engine.backend import set_limits
from safetrain.engine.folding import FLOAT, folded, open_to_fold, plan_of, quantization_in
from safetrain.engine.tuned import ExportComparison, ExportJob, require_memory
from safetrain.engine.upstream.loading import copy_beside, write_config
from safetrain.engine.weight_files import save_shards

MORE_BITS = 8  # if the base's own bits lose too much


def fuse_adapter(job: ExportJob, say: Callable[[str], None], bits: int | None = None) -> ExportReport:
    """Write the first fused model that is accurate enough to ``job.out``, complete or not at all, with its report.

    ``bits``: FLOAT, or bits of the changed layers; None tries the base's own, then 8, then float. Raises ConfigError,
    ModelError if no model is accurate enough or adapter and base do not match, DiskFullError, and MachineError if
    memory is too small to measure a model.
    """
    parent, files = require_new(job.out), read_model_files(job.base)
    require_base(job.adapter, job.base, files.fingerprint)
    set_limits(job.mlx_limit_bytes)
    own, tried = files.quantization_bits, list[tuple[float, str]]()  # share kept, why it fails
    order: list[int | None] = [FLOAT if bits is None else bits]
    if bits is None and own is not None:
        order = [None, MORE_BITS, FLOAT] if own < MORE_BITS else [None, FLOAT]
    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        job.out.parent.mkdir(parents=True, exist_ok=True)
        comparison = ExportComparison(job, files, say)
        with tempfile.TemporaryDirectory(dir=job.out.parent, prefix=".fuse-") as scratch:
            folder = Path(scratch) / "fused"
            for each in order:
                name = "float" if each == FLOAT else f"{each or own} bits"
                size = write_fused(job, each, folder)
                do = "close other programs, or keep base and adapter separate"
                require_memory(size, f"the fused model ({name})", do)
                set_limits(job.mlx_limit_bytes + max(0, size - files.static_bytes))
                report, why = comparison.of(job.open(folder), name, name, size)
                gc.collect()
                if not why:
                    write_record(folder / REPORT, report)
                    replace_directory(folder, job.out)
                    return report
                tried.append((report.kept, f"in {name}, it {why}"))
                shutil.rmtree(folder)
    kept, why = max(tried)
    raise ModelError(
        f"{'No fused model keeps' if bits is None else 'This fused model does not keep'} the improvement: {why}.",
        where=str(job.adapter),
        expected=f"at least {100 * (1 - job.may_lose):g} % kept",
        got=f"{100 * kept:.1f} %",
        do="keep base and adapter separate, or raise --may-lose" if bits is None
        else "leave out --bits and --float, so that more bits are tried",
    )  # fmt: skip


def write_fused(job: ExportJob, bits: int | None, folder: Path) -> int:
    """Write a fused model into a new ``folder``; returns the size of its weights, in bytes."""
    module, config, folds = open_to_fold(job.base, job.adapter)
    plan = plan_of(module, folds, bits)
    arrays = folded(module, folds, plan)
    size = sum(value.nbytes for value in arrays.values())
    do = "free some space, or choose a folder on another disk"
    require_room(job.out.parent, size, "There is too little disk space for the fused model.", do)
    folder.mkdir()
    write_config(module, quantization_in(config, module, plan), folder)
    form = read_prompt_format(job.adapter)
    copy_beside(job.base, folder, form.stop_ids if form else ())
    if form is not None:
        write_prompt_format(folder, form)  # for safetrain chat and serve
    del module, folds  # frees what is written
    save_shards(folder, arrays)
    return size

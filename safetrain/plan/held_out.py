"""The rows of any file as a test file, for any model: `safetrain evaluate`."""

import tempfile
from pathlib import Path

import numpy as np

from safetrain.core.data.held_out import HeldOut, held_out_in
from safetrain.core.data.jsonl import bad_rows
from safetrain.core.data.store import Provenance, open_store, store_path
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.data.tokenizer_files import tokenizer_hash
from safetrain.core.errors import DataError, NoRowsError
from safetrain.core.model.files import read_limits
from safetrain.plan.dataset import refused, today, write_split
from safetrain.plan.findings import Findings
from safetrain.plan.row_columns import named_when_full
from safetrain.plan.sources import SPLITS
from safetrain.plan.spool import Spool
from safetrain.plan.tokenizing import Limits, RowReader
from safetrain.plan.validate import Decided

NAME = "test"


def read_held_out(path: Path, model: Path, decided: Decided, max_examples: int | None, max_seq_length: int) -> HeldOut:
    """The first ``max_examples`` rows of ``path`` (None: all), cut, and what they ask, as ``model`` writes them.

    Raises DataError for a file that is not there, has no rows, or has some that cannot be used; ModelError.
    """
    if not path.is_file():
        what = "The data is a folder." if path.is_dir() else "The data file does not exist."
        raise DataError(what, where=str(path), do="name a file")
    findings = Findings(decided.severities)
    tokenizer = ChatTokenizer(model, today())
    reader = RowReader(tokenizer, decided.labelling, Limits(*read_limits(model)), findings, decided.columns)
    with tempfile.TemporaryDirectory(prefix="safetrain-") as scratch:
        folder = Path(scratch)
        with named_when_full(folder), Spool(folder) as spool:
            for block in reader.blocks(path, str(path), only_whole=True):
                spool.add(block, 0)
            if reader.faults:
                raise bad_rows(reader.faults, reader.unreadable, reader.remedy() or "correct or remove them")
            if reader.refused:
                raise refused(findings.listed())
            if not len(spool):
                raise NoRowsError(path)
            asked, opening = reader.openings.most_common(1)[0][0] if reader.openings else ("", "")
            made = Provenance(tokenizer_hash(model), "", "", today().isoformat(), reader.stop_ids(), opening, asked)
            write_split(folder, NAME, spool, np.full(len(spool), SPLITS.index(NAME), dtype=np.uint8), made, [path])
        store = open_store(store_path(folder, NAME))  # mapped: its file may go
    return held_out_in(store, max_examples, max_seq_length)

"""What validation says of a corpus of tokens, without a pipeline."""

import dataclasses
import tempfile
from pathlib import Path

from safetrain.core.errors import DataError
from safetrain.core.model.files import read_model_files
from safetrain.plan.corpus import validate_corpus
from safetrain.plan.dataset import Source
from safetrain.plan.findings import ORDER, Findings, Severities
from safetrain.plan.validate import Decided, Validation

HELD_OUT = 0.1  # of it, as params.yaml ships: splits are counted together here


def validate_tokens(path: Path, model: Path, decided: Decided) -> Validation:
    """Look at every token of a corpus; what is written meanwhile is gone afterwards. Raises ModelError."""
    vocabulary = read_model_files(model).vocab_size
    source = Source(path, HELD_OUT, HELD_OUT, decided.similarity)
    untold = Severities(downgrade=("TOKENIZER-DIFFERS",))  # so that no finding ends it
    with tempfile.TemporaryDirectory() as folder:
        try:
            into = Path(folder) / "validated"
            found = validate_corpus(source, model, vocabulary, decided.labelling, untold, into, lambda _: None)
        except DataError as error:
            findings = Findings(decided.severities)
            findings.add("FILE-UNREADABLE", error.what, where=[error.where], remedy=error.do)
            return Validation((), findings.listed(), 0, 0, 0, (), None, documents=True)
    splits = [split for _, split in found.splits]
    graded = [dataclasses.replace(each, severity=decided.severities.of(each.id)) for each in found.findings]
    return Validation(
        rows=(),
        findings=tuple(sorted(graded, key=lambda each: ORDER.index(each.severity))),
        count=sum(split.rows for split in splits),
        tokens=sum(split.tokens for split in splits),
        trained_tokens=sum(split.trained_tokens for split in splits),
        unmade=(),
        context=None,
        documents=True,
        label_bytes=sum(split.label_bytes for split in splits),
    )

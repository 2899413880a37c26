"""Was a corpus made with the model's tokenizer? By what its files name, and by documents that are tokenized again."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from safetrain.core.data.token_files import OpenFiles
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.data.tokenizer_files import make_same_tokens
from safetrain.plan.corpus_files import TokenizedFile
from safetrain.plan.findings import Findings

SAMPLED, MOST_TOKENS, LEAST_TOKENS = 64, 256, 8  # documents, and tokens of each; shorter ones say little
TAIL = 4  # tokens at the end of a sample, which were joined with what follows
LEAST_SAME = 0.5  # of the sampled documents; with another tokenizer hardly one is


def compare_tokenizers(
    findings: Findings, files: Sequence[TokenizedFile], tokenizer: ChatTokenizer, vocabulary: int
) -> None:
    """Say where the model's tokenizer did not make the corpus: its text, tokenized again, gives other ids."""
    names = sorted({each.tokenizer for each in files if each.tokenizer})
    samples = [sample for sample in _samples(files) if int(sample.max()) < vocabulary]  # others the scan names
    same = sum(_is_same(sample, tokenizer) for sample in samples)
    named = f", {' and '.join(names)} by its metadata" if names else ""
    if samples and same < LEAST_SAME * len(samples):
        detail = f"of {len(samples)} sampled documents, {same} give their own ids when they are tokenized again{named}"
        findings.add("TOKENIZER-DIFFERS", detail)
        return
    for name in names:
        if not _is_of(name, tokenizer.folder):
            findings.add("TOKENIZER-NAMED", repr(name))


def _samples(files: Sequence[TokenizedFile]) -> list[np.ndarray]:
    """The beginnings of documents from all over the corpus, without the token that ends them."""
    found, reader = list[np.ndarray](), OpenFiles()
    having = [each for each in files if len(each.ends)]
    for each in having[:: -(-len(having) // SAMPLED) or 1]:
        starts = np.concatenate([[0], each.ends[:-1]])
        long = np.flatnonzero(each.ends - starts > LEAST_TOKENS)
        wanted = max(1, SAMPLED // len(having))
        for number in long[np.linspace(0, len(long) - 1, min(wanted, len(long))).astype(np.int64)].tolist():
            count = min(MOST_TOKENS, int(each.ends[number] - starts[number]) - 1)
            width = each.file.token_bytes
            raw = reader.read(Path(each.file.path), int(starts[number]) * width, count * width)
            found.append(np.frombuffer(raw, dtype=f"<u{width}"))
    return found


def _is_same(sample: np.ndarray, tokenizer: ChatTokenizer) -> bool:
    """Whether the text of these ids has them; a token at its beginning may be missing, or one more there."""
    ids = sample.tolist()
    again = tokenizer.encode_chat(tokenizer.spell(ids))
    kept = ids[: len(ids) - TAIL]
    return any(again[at : at + len(kept)] == kept for at in (0, 1)) or again[: len(kept) - 1] == kept[1:]


def _is_of(name: str, folder: Path) -> bool:
    """Whether what the metadata names is the model's tokenizer: its file, or a model of the same name."""
    path = Path(name)
    if path.name == "tokenizer.json" and path.is_file():
        return make_same_tokens(path.parent, folder)
    return path.name.casefold() in (folder.name.casefold(), folder.resolve().name.casefold())

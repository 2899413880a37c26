"""What a model trained from scratch writes at each validation: a few greedy continuations, for people to read."""

import json
import statistics
from pathlib import Path

import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.recorder import Edge, Phase, Recorder, Work
from safetrain.core.run_folder import WrittenSample
from safetrain.core.storage.files import write_text
from safetrain.engine.evaluation import answer
from safetrain.engine.model import BaseModel

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 8, 32


class Samples:
    """Asks the model to go on from nothing, and from the beginnings of documents that it is validated on."""

    def __init__(self, base: Path, valid: TokenRows, end_ids: tuple[int, ...], path: Path) -> None:
        """``path``: the file that samples are added to. Without a tokenizer.json there are none."""
        from tokenizers import Tokenizer  # only here: an engine that writes no samples starts without it

        file = base / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(file)) if file.is_file() and end_ids else None
        self._ends, self._path, self._written = frozenset(end_ids), path, list[WrittenSample]()
        some = np.linspace(0, len(valid) - 1, min(len(valid), 16 * PROMPTS)).round().astype(int).tolist()
        opened = [valid[row].ids for row in dict.fromkeys(some) if int(valid[row].ids[0]) in end_ids]
        beginnings = [ids[: 1 + PROMPT_TOKENS].tolist() for ids in opened if len(ids) > PROMPT_TOKENS]
        opens = statistics.mode([int(ids[0]) for ids in opened] or end_ids[:1]) if end_ids else 0
        self._prompts = [[opens], *beginnings[:PROMPTS]] if end_ids else []

    def begin(self, step: int) -> None:
        """Forget what a run wrote beyond the step that it continues from."""
        self._written = [each for each in _read(self._path) if each.step <= step] if step else []
        if not self._written:
            self._path.unlink(missing_ok=True)

    def take(self, model: BaseModel, step: int, most_tokens: int, recorder: Recorder) -> list[WrittenSample]:
        """Let the model write, ``most_tokens`` at a time; ``write`` then adds it to the file."""
        if self._tokenizer is None:
            return []

        def beat(_done: float) -> None:
            recorder.write(Phase.EVALUATE, Edge.BEFORE, Work(step))

        made = answer(model, self._prompts, self._ends, NEW_TOKENS, most_tokens, beat)
        found = [
            WrittenSample(step, self._tokenizer.decode(prompt[1:]), self._tokenizer.decode(ids))
            for prompt, ids in zip(self._prompts, made, strict=True)
        ]
        self._written += found
        return found

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return len(self._text().encode())

    def write(self) -> None:
        """All samples into the file."""
        write_text(self._path, self._text())

    def _text(self) -> str:
        return "".join(f"{json.dumps(vars(each), ensure_ascii=False)}\n" for each in self._written)


def _read(path: Path) -> list[WrittenSample]:
    """Those of a file, up to a line that is no sample: somebody has changed it, and samples are for reading alone."""
    found = list[WrittenSample]()
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.split("\n")[:-1]:  # a text may hold other characters that splitlines() divides at
        try:
            found.append(WrittenSample(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return found

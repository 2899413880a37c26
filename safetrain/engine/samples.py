"""What a model trained from scratch writes at each validation: a few greedy continuations, for people to read."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.protocol.flight import Edge, Phase, Recorder, Work
from safetrain.core.storage.files import write_text
from safetrain.engine.evaluation import answer
from safetrain.engine.model import BaseModel

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 8, 32


@dataclass(frozen=True)
class SampleText:
    """One continuation. ``prompt`` is empty where the model begins by itself."""

    step: int
    prompt: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step} writes: {self.prompt}[{self.text.strip()}]".replace("\n", " ")


class Samples:
    """Asks the model to go on from nothing, and from the beginnings of documents that it is validated on."""

    def __init__(self, base: Path, valid: TokenRows, end_ids: frozenset[int], path: Path) -> None:
        """``path``: the file that samples are added to. Without a tokenizer.json there are none."""
        from tokenizers import Tokenizer  # only here: an engine that writes no samples starts without it

        file = base / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(file)) if file.is_file() and end_ids else None
        self._ends, self._path = end_ids, path
        some = np.linspace(0, len(valid) - 1, min(len(valid), 16 * PROMPTS)).round().astype(int).tolist()
        opened = [valid[row].ids for row in dict.fromkeys(some) if int(valid[row].ids[0]) in end_ids]
        beginnings = [ids[: 1 + PROMPT_TOKENS].tolist() for ids in opened if len(ids) > PROMPT_TOKENS]
        self._prompts = [[min(end_ids)], *beginnings[:PROMPTS]] if end_ids else []

    def begin(self, step: int) -> None:
        """Forget what a run wrote beyond the step that it continues from."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if step and self._path.is_file() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        if kept:
            write_text(self._path, "".join(f"{line}\n" for line in kept))
        else:
            self._path.unlink(missing_ok=True)

    def take(self, model: BaseModel, step: int, most_tokens: int, recorder: Recorder) -> list[SampleText]:
        """Let the model write, ``most_tokens`` at a time, and add it to the file."""
        if self._tokenizer is None:
            return []

        def beat(_done: float) -> None:
            recorder.write(Phase.EVALUATE, Edge.BEFORE, Work(step))

        made = answer(model, self._prompts, self._ends, NEW_TOKENS, most_tokens, beat)
        found = [
            SampleText(step, self._tokenizer.decode(prompt[1:]), self._tokenizer.decode(ids))
            for prompt, ids in zip(self._prompts, made, strict=True)
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(vars(written), ensure_ascii=False) + "\n" for written in found)
        return found

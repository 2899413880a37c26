"""llama.cpp as the judge of an exported GGUF file: how it splits texts, what it computes and how it writes chats."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 512


class LlamaJudge:
    """A file, opened by llama-cpp-python."""

    def __init__(self, file: Path, context: int = BATCH, adapter: Path | None = None) -> None:
        import llama_cpp

        sizes = {"n_ctx": max(BATCH, context), "n_batch": BATCH, "n_ubatch": BATCH}
        self._llama: Any = llama_cpp.Llama(
            str(file), n_threads=1, n_threads_batch=1, verbose=False, **sizes, **lora(adapter)
        )

    def split(self, text: str) -> list[int]:
        """Tokens of a text that may have special ones."""
        return self._llama.tokenize(text.encode(), add_bos=False, special=True)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits (tokens, vocabulary); those of one batch are in memory at a time."""
        self._llama._ctx.kv_cache_clear()
        found = []
        for start in range(0, len(ids), BATCH):
            batch = list(ids[start : start + BATCH])
            self._llama._batch.set_batch(batch=batch, n_past=start, logits_all=True)
            self._llama._ctx.decode(self._llama._batch)
            size = (len(batch), self._llama.n_vocab())
            made = np.ctypeslib.as_array(self._llama._ctx.get_logits(), shape=(size[0] * size[1],))
            found.append(made.reshape(size).copy())
        return np.concatenate(found)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation by the file's template."""
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = self._llama.metadata.get("tokenizer.chat_template", "")
        begin, end = (self._text(number) for number in (self._llama.token_bos(), self._llama.token_eos()))
        write = Jinja2ChatFormatter(template, eos_token=end, bos_token=begin)
        return write(messages=[dict(message) for message in messages]).prompt

    def _text(self, number: int) -> str:
        return self._llama._model.token_get_text(number) if number != -1 else ""


def lora(adapter: Path | None) -> dict[str, str]:
    return {} if adapter is None else {"lora_path": str(adapter)}


def divergence(of: np.ndarray, found: np.ndarray) -> float:
    """Mean KL(of || found) of logits (tokens, vocabulary), in nats."""

    def logs(logits: np.ndarray) -> np.ndarray:
        shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    one, other = logs(of), logs(found)
    return float((np.exp(one) * (one - other)).sum(axis=-1).mean())

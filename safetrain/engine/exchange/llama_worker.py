"""Opens a GGUF file with llama.cpp, in a process of its own: a fault in there ends that process alone.

``python -m safetrain.engine.exchange.llama_worker FILE FOLDER PARENT``: it ends with the process PARENT, and prints the
steps that it begins: open, split, compute, render. FOLDER has request.npz and request.json, and gets answer.npz and
answer.json, as ``_ask`` in gguf_llama.py writes and reads them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from safetrain.engine.child_process import die_with_parent

BATCH = 512


def main(file: str, folder: str, parent: str) -> None:
    """Split the texts, compute the logits at every place that is asked for, and render the conversations."""
    die_with_parent(int(parent))
    print("open", flush=True)
    import llama_cpp
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    arrays = np.load(Path(folder) / "request.npz")
    asked = json.loads((Path(folder) / "request.json").read_text(encoding="utf-8"))
    ends, lengths = np.cumsum(arrays["lengths"]), arrays["lengths"]
    context = max(BATCH, int(lengths.max()))
    llama = llama_cpp.Llama(file, n_ctx=context, n_batch=BATCH, n_ubatch=BATCH, verbose=False)
    print("split", flush=True)
    tokens = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]]
    print("compute", flush=True)
    logits = []
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        places = arrays["places"][arrays["rows"] == row]
        logits.append(_logits(llama, arrays["ids"][end - length : end].tolist(), places))
    np.savez(Path(folder) / "answer.npz", logits=np.concatenate(logits))
    print("render", flush=True)
    template = llama.metadata.get("tokenizer.chat_template", "")
    begin, end = (_text(llama, number) for number in (llama.token_bos(), llama.token_eos()))
    render = Jinja2ChatFormatter(template, eos_token=end, bos_token=begin)
    answer = {
        "version": llama_cpp.__version__,
        "tokens": tokens,
        "chats": [render(messages=messages).prompt for messages in asked["chats"]],
    }
    (Path(folder) / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


def _logits(llama: Any, ids: list[int], places: np.ndarray) -> np.ndarray:
    """Logits (places, vocabulary) of a row. Those of one batch are in memory: a long row's would not fit there."""
    llama._ctx.kv_cache_clear()
    found = []
    for start in range(0, len(ids), BATCH):
        batch = ids[start : start + BATCH]
        llama._batch.set_batch(batch=batch, n_past=start, logits_all=True)
        llama._ctx.decode(llama._batch)
        size = (len(batch), llama.n_vocab())
        made = np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(size[0] * size[1],)).reshape(size)
        found.append(made[places[(places >= start) & (places < start + BATCH)] - start].copy())
    return np.concatenate(found)


def _text(llama: Any, number: int) -> str:
    return llama._model.token_get_text(number) if number != -1 else ""


if __name__ == "__main__":
    main(*sys.argv[1:])

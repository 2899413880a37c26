"""Opens a GGUF file with llama.cpp, in a process of its own: a fault in there ends that process alone.

``python -m safetrain.engine.exchange.llama_worker FILE FOLDER``: FOLDER has request.npz and request.json, and gets
answer.npz and answer.json (``Request`` and ``Answer`` in gguf_llama.py).
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 512


def main(file: str, folder: str) -> None:
    """Split the texts, render the conversations, and compute the logits at every place that is asked for."""
    import llama_cpp
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    arrays = np.load(Path(folder) / "request.npz")
    asked = json.loads((Path(folder) / "request.json").read_text(encoding="utf-8"))
    ends, lengths = np.cumsum(arrays["lengths"]), arrays["lengths"]
    context = max(BATCH, int(lengths.max()))
    llama = llama_cpp.Llama(file, n_ctx=context, n_batch=BATCH, logits_all=True, verbose=False)
    logits = []
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        llama.reset()
        llama.eval(arrays["ids"][end - length : end].tolist())
        logits.append(llama.scores[arrays["places"][arrays["rows"] == row]].copy())
    np.savez(Path(folder) / "answer.npz", logits=np.concatenate(logits))
    template = llama.metadata.get("tokenizer.chat_template", "")
    begin, end = (_text(llama, number) for number in (llama.token_bos(), llama.token_eos()))
    render = Jinja2ChatFormatter(template, eos_token=end, bos_token=begin)
    answer = {
        "version": llama_cpp.__version__,
        "tokens": [llama.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]],
        "chats": [render(messages=messages).prompt for messages in asked["chats"]],
    }
    (Path(folder) / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


def _text(llama: Any, number: int) -> str:
    return llama._model.token_get_text(number) if number != -1 else ""


if __name__ == "__main__":
    main(*sys.argv[1:])

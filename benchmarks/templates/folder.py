"""A model's folder around a published template: everything but weights."""

import json
from pathlib import Path
from typing import Any

from benchmarks.templates.families import WORDS, Model, special_tokens
from benchmarks.templates.material import Published

EMBEDDED = Path("models/encyclopedia-3m")
CONTEXT = 1_048_576
ROOM = 2_560  # ids: the embedded tokenizer's and the added ones


def write_folder(folder: Path, template: Published, model: Model) -> Path:
    """Write tokenizer, template, config and generation_config of ``model``; returns the folder."""
    folder.mkdir(parents=True)
    tokens = special_tokens(model, template.text)
    words = [word for word in WORDS if word in template.text and word not in tokens]
    tokenizer = json.loads((EMBEDDED / "tokenizer.json").read_text(encoding="utf-8"))
    ids = _add(tokenizer, tokens, words)
    _write(folder / "tokenizer.json", tokenizer)
    names: dict[str, Any] = {"eos_token": model.eos, "pad_token": "<|pad|>"}
    names |= {"bos_token": model.bos} if model.bos else {}
    names |= {"additional_special_tokens": list(model.extra)} if model.extra else {}
    fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    _write(folder / "tokenizer_config.json", fixed | {"clean_up_tokenization_spaces": False} | names)
    (folder / "chat_template.jinja").write_text(template.text, encoding="utf-8")
    config = json.loads((EMBEDDED / "config.json").read_text(encoding="utf-8"))
    bos = ids[model.bos] if model.bos else None
    config |= {"vocab_size": ROOM, "max_position_embeddings": CONTEXT, "bos_token_id": bos}
    _write(folder / "config.json", config | {"eos_token_id": ids[model.eos], "pad_token_id": ids["<|pad|>"]})
    if model.stops:
        _write(folder / "generation_config.json", {"eos_token_id": [ids[stop] for stop in model.stops]})
    return folder


def _add(tokenizer: dict[str, Any], tokens: list[str], words: list[str]) -> dict[str, int]:
    """Add control tokens and words to ``tokenizer``; returns the ids of all that was added, now or before."""
    added = tokenizer["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    following = len(tokenizer["model"]["vocab"])
    for token in [*tokens, *words]:
        if token in tokenizer["model"]["vocab"] and token not in ids:
            ids[token] = tokenizer["model"]["vocab"][token]
        elif token not in ids:
            ids[token], following = following, following + 1
        else:
            continue
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": ids[token], "content": token, **flags, "special": token not in words})
    return ids


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")

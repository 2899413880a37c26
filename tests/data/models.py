"""Models with chat templates of our own, as small as shows one way in which published ones differ."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.data.forms import parse_row
from safetrain.data.render import RenderedRow, Renderer
from safetrain.data.rows import RowError
from safetrain.data.tokenize import labelled
from tests.conftest import EMBEDDED

Message = dict[str, object]


def model_with(
    folder: Path,
    template: str | None,
    *,
    special: Sequence[str] = (),
    end: str = "<|end|>",
    begin: str | None = None,
    config: dict[str, object] | None = None,
) -> Path:
    """The embedded model's tokenizer with another template and more special tokens; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((EMBEDDED / "tokenizer.json").read_text())
    known = {token["content"] for token in tokenizer["added_tokens"]}
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"]))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    new = [token for token in dict.fromkeys([*special, end, *([begin] if begin else [])]) if token not in known]
    tokenizer["added_tokens"] += [{"id": first + n, "content": token, **flags} for n, token in enumerate(new)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, **({"bos_token": begin} if begin else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    shutil.copy(EMBEDDED / "config.json", folder / "config.json")
    values = json.loads((folder / "config.json").read_text())
    values = {**values, "vocab_size": first + len(new), **(config or {})}
    values.pop("eos_token_id", None)
    (folder / "config.json").write_text(json.dumps(values))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def with_context(folder: Path, tokens: int) -> Path:
    """The embedded model as if it read so many tokens; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    config = json.loads((EMBEDDED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))
    return folder


def turns(*texts: str | Message) -> list[Message]:
    """Messages: texts are a user's and an assistant's by turns, others stand as they are."""
    roles = ["user", "assistant"]
    found: list[Message] = []
    for text in texts:
        if isinstance(text, str):
            found.append({"role": roles[0], "content": text})
            roles.reverse()
        else:
            found.append(text)
            roles = ["assistant", "user"] if text["role"] in ("user", "tool") else ["user", "assistant"]
    return found


def rendered(model: Path, messages: list[Message], **more: object) -> tuple[RenderedRow, ChatTokenizer]:
    """A chat as it is trained."""
    tokenizer = ChatTokenizer(model)
    return renderer(tokenizer).render(parse_row({"messages": messages, **more})), tokenizer


def renderer(tokenizer: ChatTokenizer) -> Renderer:
    """What turns rows into texts with labels for this model."""
    return Renderer(tokenizer.template, tokenizer.controls, tokenizer.end_token)


def trained(model: Path, messages: list[Message], **more: object) -> list[str]:
    """The text of each run of labels, read back from the tokens."""
    row, tokenizer = rendered(model, messages, **more)
    tokens, _ = labelled(row, tokenizer.encode_chats([row.text])[0])
    runs: list[list[int]] = [[]]
    for token, is_label in zip(tokens.ids.tolist(), tokens.trained.tolist(), strict=True):
        if is_label:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, special=True) for run in runs if run]


def remarks(model: Path, messages: list[Message], **more: object) -> set[str]:
    """The ids of what is told of a chat; of the error, if it cannot be trained."""
    try:
        return {identifier for identifier, _ in rendered(model, messages, **more)[0].remarks}
    except RowError as error:
        return {error.id}

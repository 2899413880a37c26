"""An adapter folder as files: its base model, its fingerprint, and how its answers begin and end."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import ModelError

CHAT_FILE = "chat.json"


@dataclass(frozen=True)
class Taught:
    """What a training teaches of where an answer begins and ends; it belongs to the adapter, not to the base."""

    stop_ids: tuple[int, ...]
    opening: str  # appended to the generation prompt when asking, so that it ends as in training
    asked: str = ""  # removed from the end of the generation prompt before that


def write_taught(folder: Path, taught: Taught) -> None:
    """Into an adapter folder that is not yet in its place."""
    text = json.dumps(dataclasses.asdict(taught), indent=2, ensure_ascii=False)
    (folder / CHAT_FILE).write_text(f"{text}\n", encoding="utf-8")


def read_taught(folder: Path) -> Taught | None:
    """None for an adapter that does not say; raises ModelError for what cannot be read."""
    path = folder / CHAT_FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return Taught(tuple(int(stop) for stop in value["stop_ids"]), str(value["opening"]), str(value["asked"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        again = "train it again, or remove the file: answers then begin and end as the base model's"
        raise ModelError(f"What the adapter was taught cannot be read: {error}", where=str(path), do=again) from None


def fingerprint(adapter: Path) -> str:
    """A hash of the adapter's weights, empty when there are none."""
    weights = adapter / "adapters.safetensors"
    if not weights.is_file():
        return ""
    with weights.open("rb") as content:  # of a full fine-tuning it is as large as the model
        return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def base_of(adapter: Path) -> Path:
    """The base model's folder, as the adapter's configuration names it; raises ModelError."""
    path = adapter / "adapter_config.json"
    try:
        return Path(json.loads(path.read_text(encoding="utf-8"))["model"])
    except FileNotFoundError:
        remedy = "train one with 'dvc repro', or go to the project's root"
        raise ModelError("There is no trained adapter.", where=str(adapter.absolute()), do=remedy) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"The adapter's configuration cannot be read: {error}", where=str(path), do="name the base with --model"
        ) from None

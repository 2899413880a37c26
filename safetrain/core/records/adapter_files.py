"""An adapter folder as files: its base model, its fingerprint, and how its answers begin and end."""

import hashlib
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.foreign import told
from safetrain.core.records.settings import ALL_LINEAR, LoraSettings
from safetrain.core.storage import paths
from safetrain.core.storage.files import json_object, read_record

CHAT_FILE = "chat.json"
BASE_FINGERPRINT = "base_fingerprint"  # in adapter_config.json
MOST_RANK, MOST_ID = 2**14, 2**31  # more than any adapter or model has
UNREADABLE, OWN_KIND = "The adapter's shape cannot be read", "it must be an adapter of safetrain or mlx-lm"
TRAINED_BY = "method"  # train.method, in adapter_config.json: fine_tune_type has fewer values


@dataclass(frozen=True)
class PromptFormat:
    """How answers begin and end after a training run; it belongs to the adapter, not to the base model."""

    stop_ids: tuple[int, ...]
    opening: str  # appended to the generation prompt, so that it ends as in training
    asked: str = ""  # removed from the end of the generation prompt before the opening is appended
    system: str = ""  # the system prompt that every row has; empty if they differ or have none
    documents: bool = False  # trained on documents, not chats: a prompt is the beginning of a document


def read_prompt_format(folder: Path) -> PromptFormat | None:
    """Read chat.json; None for an adapter without one. Raises ModelError if it is unreadable."""
    path = folder / CHAT_FILE
    if not path.is_file():
        return None
    again = "train again, or remove the file: answers then begin and end as with the base model"
    with told("The adapter's prompt format cannot be read", path, again):
        form = read_record(path, PromptFormat)
        if not all(0 <= number < MOST_ID for number in form.stop_ids):
            raise TypeError("its stop_ids are not all token ids")
        return form


def fingerprint(adapter: Path) -> str:
    """A hash of the adapter's weights, empty if it has no weights."""
    weights = adapter / "adapters.safetensors"
    if not weights.is_file():
        return ""
    with weights.open("rb") as content:  # after full fine-tuning it is as large as the model
        return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def start_of(adapter: str | None) -> str:
    """What decides the outputs of train.from_adapter, its weights and scale; empty without one. Raises ModelError."""
    return f"{fingerprint(Path(adapter))} {lora_number(Path(adapter), 'scale'):g}" if adapter else ""


def starting_point(base_fingerprint: str, start: str) -> str:
    """RunIdentity.base_model: the base's fingerprint, and ``start_of`` the first adapter."""
    return f"{base_fingerprint} {start}".strip()


def base_of(adapter: Path) -> Path:
    """Read the base model's folder from the adapter's configuration; raises ModelError."""
    return Path(_configuration(adapter).get("model", ""))


def lora_number(adapter: Path, name: str) -> float:
    """Read the scale or the dropout of an adapter; raises ModelError."""
    config = _configuration(adapter)
    with told(UNREADABLE, adapter, OWN_KIND):
        number = float(config.get("lora_parameters", {}).get(name, {"scale": 1.0, "dropout": 0.0}[name]))
        if not math.isfinite(number):
            raise ValueError(f"its {name} is {number}")
        return number


def adapter_method(adapter: Path) -> str:
    """Read the training method: lora, dora, full or pretrain; raises ModelError."""
    config = _configuration(adapter)
    return str(config.get(TRAINED_BY) or config.get("fine_tune_type", "lora"))


def adapter_shape(adapter: Path, num_blocks: int) -> LoraSettings:
    """Read an adapter's shape, for a model of ``num_blocks`` blocks; raises ModelError."""
    config = _configuration(adapter)
    with told(UNREADABLE, adapter, OWN_KIND):
        shape, layers = config.get("lora_parameters", {}), config["num_layers"]
        layers = min(layers, num_blocks) if layers > 0 else num_blocks  # -1 means all
        targets, rank = tuple(shape.get("keys") or (ALL_LINEAR,)), int(shape.get("rank", 1))
        if not 0 < rank <= MOST_RANK or not all(isinstance(name, str) for name in targets):
            raise ValueError("its rank or its keys are impossible")
        return LoraSettings(rank, lora_number(adapter, "scale"), 0.0, layers, targets)


def starting_shape(folder: str, method: str, base: Path, base_fingerprint: str, num_blocks: int) -> LoraSettings:
    """The shape of train.from_adapter; raises ModelError if it belongs to another base, or cannot be read.

    Raises ConfigError if ``method`` trains another kind of adapter, or training replaces the folder.
    """
    adapter = Path(folder)
    if adapter.resolve().is_relative_to(paths.OUTPUT.resolve()):
        do = f"copy it: cp -r {shlex.quote(folder)} first_adapter, then train.from_adapter=first_adapter"
        raise ConfigError("train.from_adapter is in a folder that training replaces.", where=folder, do=do)
    require_base(adapter, base, base_fingerprint)
    kind, found = "dora" if method == "dora" else "lora", adapter_method(adapter)
    if found != kind:
        what, do = "train.from_adapter is an adapter of another kind.", "begin with another adapter"
        raise ConfigError(what, where=folder, expected=kind, got=found, do=do)
    return adapter_shape(adapter, num_blocks)


def require_base(adapter: Path, base: Path, base_fingerprint: str) -> None:
    """Raise ModelError if the adapter has no weights, or if its base model's fingerprint is not ``base_fingerprint``.

    Adapters that name no fingerprint pass, for example mlx-lm's own.
    """
    config = _configuration(adapter)
    trained_on = config.get(BASE_FINGERPRINT)
    if "peft_type" in config:
        do = "merge it into its base with PEFT (merge_and_unload), then train that model"
        raise ModelError("This is a PEFT adapter, which safetrain cannot read.", where=adapter, do=do)
    if not (adapter / "adapters.safetensors").is_file():
        raise ModelError("The adapter has no adapters.safetensors.", where=adapter, do="train: safetrain run")
    if trained_on not in (None, base_fingerprint):
        raise ModelError(
            "The adapter was trained on another base model.",
            where=adapter,
            expected=f"a base model with fingerprint {trained_on}",
            got=f"fingerprint {base_fingerprint}, of {base}",
            do="name the base that it was trained on (model.path, or --model), or train again",
        )


def _configuration(adapter: Path) -> dict[str, Any]:
    path = adapter / "adapter_config.json"
    if not path.is_file():
        remedy = "name the adapter's folder, or train one with 'safetrain run' in the project's root"
        raise ModelError("No trained adapter found.", where=adapter.absolute(), do=remedy)
    config = json_object(path)
    if config and isinstance(config.get("model", ""), str):
        return config
    do = "the file is damaged: copy the folder again, or train again"
    raise ModelError("The adapter's configuration cannot be read.", where=path, do=do)

"""An adapter folder as files: which base model it belongs to, and which adapter it is."""

import hashlib
import json
from pathlib import Path

from safetrain.core.errors import ModelError


def fingerprint(adapter: Path) -> str:
    """A hash of the adapter's weights, empty when there are none."""
    weights = adapter / "adapters.safetensors"
    return hashlib.blake2b(weights.read_bytes(), digest_size=16).hexdigest() if weights.is_file() else ""


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

"""An adapter folder as files: which base model it belongs to."""

import json
from pathlib import Path

from safetrain.core.errors import ModelError


def base_of(adapter: Path) -> Path:
    """The base model's folder, as the adapter's configuration names it; raises ModelError."""
    path = adapter / "adapter_config.json"
    try:
        return Path(json.loads(path.read_text(encoding="utf-8"))["model"])
    except FileNotFoundError:
        raise ModelError("There is no trained adapter.", where=str(adapter), do="train one: dvc repro") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"The adapter's configuration cannot be read: {error}", where=str(path), do="name the base with --model"
        ) from None

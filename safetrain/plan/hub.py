"""Download a model from the Hugging Face Hub: check disk space first, and leave a complete folder or none."""

import re
from pathlib import Path

from safetrain.core.errors import ModelError
from safetrain.core.model.files import SOURCE, read_model_files, source_of
from safetrain.core.storage.files import require_room, write_text

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
SPARE_BYTES = 2**30  # for the other files, and as a reserve
FREE = "free some disk space, or choose another folder with --into"


def fetch_model(hub_id: str, into: Path) -> Path:
    """Download ``hub_id`` into a new folder below ``into``; continues an interrupted download.

    All files come from one commit, which is recorded, because the main branch may change during the download.

    Raises ModelError if the Hub does not have the model or cannot be reached, DiskFullError if the disk is too small.
    """
    import httpx2
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if HUB_ID.fullmatch(hub_id) is None:
        raise ModelError(f"{hub_id!r} is not a Hub ID.", expected="owner/name")
    target = into / hub_id.rpartition("/")[2]
    partial = into / f".{target.name}.partial"
    if target.exists():
        read_model_files(target)
        _require_same_source(target, hub_id)
        return target
    try:
        info = HfApi().model_info(hub_id, files_metadata=True)
        files = [file for file in info.siblings or [] if Path(file.rfilename).match("*.safetensors")]
        into.mkdir(parents=True, exist_ok=True)
        present_bytes = sum(file.stat().st_size for file in partial.rglob("*.safetensors")) if partial.is_dir() else 0
        missing_bytes = sum(file.size or 0 for file in files) - present_bytes
        require_room(into, missing_bytes + SPARE_BYTES, "The disk has no room for this model.", FREE)
        snapshot_download(hub_id, revision=info.sha, local_dir=partial, allow_patterns=list(PATTERNS))
    except HfHubHTTPError as error:
        raise ModelError(
            f"The Hub does not provide {hub_id}: {str(error).splitlines()[0]}",
            do="check the name; for a gated model: hf auth login",
        ) from error
    except (OSError, httpx2.HTTPError) as error:
        raise ModelError(
            f"The download of {hub_id} did not finish: {error}",
            where=constants.ENDPOINT,
            do="check the internet connection, then run the same command again; the download continues. "
            f"Offline, copy the model's folder from another machine into {into}",
        ) from error
    read_model_files(partial)
    write_text(partial / SOURCE, f"{hub_id}\n{info.sha}\n")
    partial.replace(target)
    return target


def _require_same_source(folder: Path, hub_id: str) -> None:
    """Raise ModelError if a folder with this name holds another model."""
    source = source_of(folder)
    if source[:1] != [hub_id]:
        raise ModelError(
            "The folder holds a different model with this name.",
            where=str(folder),
            expected=hub_id,
            got=f"{' '.join(source) or 'unknown'} by {SOURCE}",
            do="move that folder away, or choose another one with --into",
        )

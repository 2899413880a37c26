"""Download a model or a data set from the Hugging Face Hub, or upload a model.

A download checks the disk space first, and leaves a complete folder or none.
"""

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.foreign import first_line
from safetrain.core.formatting import with_python
from safetrain.core.model.files import SOURCE, hub_id_of, read_model_files
from safetrain.core.storage.files import json_object, require_room, write_text

DATA_SET = "datasets/"  # as in the Hub's addresses
HUB_ID = re.compile(rf"({DATA_SET})?[\w.-]+/[\w.-]+")
LICENSE_PATTERNS = ["README.md", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"]
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *LICENSE_PATTERNS]
DATA_PATTERNS = ["*.json*", "*.csv*", "*.tsv*", "*.parquet", "*.arrow", "*.txt*"]
SPARE_BYTES = 2**30  # as a reserve
HF_AUTH = with_python("huggingface_hub.cli.hf auth")
FREE = "free some disk space, or choose another folder with --into"


def fetch(hub_id: str, into: Path) -> Path:
    """Download a model, or with ``datasets/`` before its name a data set, into a new folder in ``into``.

    Continues an interrupted download of the same commit. All files come from one commit, which is recorded, because the
    main branch may change during the download.

    Raises ModelError if the Hub does not have it or cannot be reached, or if a file differs from the Hub's;
    DiskFullError if the disk is too small.
    """
    _require_id(hub_id)
    target = into / hub_id.rpartition("/")[2]
    if target.exists():
        if (found := hub_id_of(target)) != hub_id:
            do, got = "move the folder away, or choose another one with --into", found or "unknown"
            what = "The folder holds something else with this name."
            raise ModelError(what, where=target, expected=hub_id, got=got, do=do)
        require_whole(target, hub_id)
        return target
    partial = into / f".{hub_id.replace('/', '--')}.partial"
    with _told(hub_id, f"; the download continues. Offline, copy the folder from another machine into {into}"):
        _download(hub_id, partial)
    require_whole(partial, hub_id)
    partial.replace(target)
    return target


@contextmanager
def _told(hub_id: str, then: str = "") -> Iterator[None]:
    """Turn an error of the Hub or of the network into ModelError."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (OSError, HTTPError) as error:
        do = f"check the internet connection and the name (gated models: {HF_AUTH} login), then run the same command "
        what = f"The download of {hub_id} did not finish: {first_line(error)}"
        raise ModelError(what, where=constants.ENDPOINT, do=f"{do}again{then}") from error


def fetched_config(hub_id: str) -> dict[str, Any]:
    """config.json of a model on the Hub, and nothing else of it; raises ModelError."""
    from huggingface_hub import hf_hub_download

    _require_id(hub_id)
    with _told(hub_id), tempfile.TemporaryDirectory() as scratch:
        return json_object(Path(hf_hub_download(hub_id, "config.json", local_dir=scratch)))


def _require_id(hub_id: str) -> None:
    if HUB_ID.fullmatch(hub_id) is None:
        raise ModelError(f"{hub_id!r} is not a Hub ID.", expected="owner/name, or datasets/owner/name")


def require_whole(folder: Path, hub_id: str) -> None:
    """Raise ModelError if a model's files are not all there, or if a data set has no file that training can read."""
    if not hub_id.startswith(DATA_SET):
        read_model_files(folder)
    elif not any(map(_is_data, folder.rglob("*"))):
        expected = "JSON lines, JSON, CSV, TSV, Parquet, Arrow or text"
        raise ModelError(f"{hub_id} has no data files.", where=folder, expected=expected)


def _is_data(path: Path) -> bool:
    return any(map(path.match, DATA_PATTERNS)) and not any(map(path.match, LICENSE_PATTERNS))


def _download(hub_id: str, partial: Path) -> None:
    """Make ``partial`` hold the files of the newest commit and SOURCE; raises ModelError for a corrupt file."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    is_data, name = hub_id.startswith(DATA_SET), hub_id.removeprefix(DATA_SET)
    patterns, kind = ([*DATA_PATTERNS, *LICENSE_PATTERNS], "dataset") if is_data else (PATTERNS, "model")
    info = (HfApi().dataset_info if is_data else HfApi().model_info)(name, files_metadata=True)
    files = list(filter_repo_objects(info.siblings or [], allow_patterns=patterns, key=lambda file: file.rfilename))
    source = f"{hub_id}\n{info.sha}\n"
    if partial.exists() and not ((partial / SOURCE).is_file() and (partial / SOURCE).read_text("utf-8") == source):
        shutil.rmtree(partial)  # of another commit, which may have files that this one does not have
    partial.mkdir(parents=True, exist_ok=True)
    write_text(partial / SOURCE, source)
    there = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
    wanted = sum(file.size or 0 for file in files)
    require_room(partial, wanted - there + SPARE_BYTES, "The disk has no room for these files.", FREE)
    snapshot_download(name, repo_type=kind, revision=info.sha, local_dir=partial, allow_patterns=patterns)
    for file in files:
        _require_same(partial / file.rfilename, file)
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the client's notes on the download


def _require_same(path: Path, file: Any) -> None:
    """Remove a file that is not the Hub's ``file`` and raise ModelError: the client keeps what an earlier run left."""
    size = path.stat().st_size if path.is_file() else 0
    digest, expected = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), file.blob_id  # Git's own hash
    if file.lfs is not None:
        digest, expected = hashlib.sha256(), file.lfs.sha256
    if path.is_file():
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, lambda: digest).hexdigest() == expected:
                return
        path.unlink()
    what, do = "A downloaded file differs from the Hub's.", "run the same command again; it downloads this file again"
    expected, got = f"{file.size} bytes, {digest.name} {expected}", f"{size} bytes, not the same content"
    raise ModelError(what, where=path, expected=expected, got=got, do=do)


def push(hub_id: str, folder: Path, *, private: bool, ask: Callable[[str], None]) -> str:
    """Upload a folder as one commit; ``private`` if its repository is new. Returns the repository's address.

    First calls ``ask`` with a description of the repository. Raises ConfigError without a login, ModelError.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HTTPError

    if HUB_ID.fullmatch(hub_id) is None or hub_id.startswith(DATA_SET):
        raise ConfigError(f"{hub_id!r} is not the Hub ID of a model.", expected="owner/name")
    if get_token() is None:
        raise ConfigError("You are not logged in to the Hugging Face Hub.", do=f"{HF_AUTH} login")
    try:
        is_new = not HfApi().repo_exists(hub_id)
        is_private = private if is_new else HfApi().model_info(hub_id).private
        ask(f"the {'new' if is_new else 'existing'} {'private' if is_private else 'public'} repository {hub_id}")
        address = HfApi().create_repo(hub_id, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=hub_id, folder_path=folder, commit_message="Upload with safetrain")
    except (OSError, HTTPError) as error:
        do = f"check the internet connection, and that your login may write there: {HF_AUTH} whoami; then try again"
        raise ModelError(f"The upload failed: {first_line(error)}", where=constants.ENDPOINT, do=do) from error
    return str(address)

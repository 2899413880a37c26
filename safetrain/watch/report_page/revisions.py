"""The files of a run as they were at a Git revision or in a DVC experiment: from Git, and from DVC's cache."""

from pathlib import Path
from typing import TYPE_CHECKING

from safetrain.core.errors import ConfigError
from safetrain.core.protocol.marker import RunMarker

if TYPE_CHECKING:
    from dvc.api import DVCFileSystem

FETCH = "dvc fetch --all-commits"  # of what somebody has pushed


class RevisionFiles:
    """What ``read_records`` reads of a revision. ``lost``: outputs whose contents DVC does not have."""

    def __init__(self, root: Path, revision: str) -> None:
        """Raises ConfigError for a revision that nobody knows, or that has no results."""
        self._revision, self.lost = revision, list[str]()
        self._files = _opened(root, revision)
        if not self._files.exists("dvc.lock"):
            raise ConfigError(
                f"{revision} has no results: DVC has recorded no training there.",
                where=f"dvc.lock of {revision}, which is not there",
                do="compare with a commit that has a dvc.lock ('dvc repro', then commit), or with an experiment of "
                "'dvc exp show'",
            )

    @property
    def name(self) -> str:
        """As it was given."""
        return self._revision

    def read(self, path: Path) -> bytes | None:
        """A file by its path in the project; None where the revision has none, or its contents are gone."""
        if not self._knows(path):
            return None
        try:
            content: bytes = self._files.read_bytes(path.as_posix())
        except FileNotFoundError:  # in no cache, and in no remote
            self.lost.append(str(path))
            return None
        return content

    def adapter(self) -> str | None:
        """Not looked at: what DVC recorded together belongs together."""
        return None

    def supervisor_lives(self, marker: RunMarker | None) -> bool:
        """Never: no process works on a commit."""
        return False

    def _knows(self, path: Path) -> bool:
        found: bool = self._files.exists(path.as_posix())
        return found


def _opened(root: Path, revision: str) -> "DVCFileSystem":
    from dvc.api import DVCFileSystem
    from dvc.exceptions import DvcException, NotDvcRepoError
    from dvc.repo import Repo
    from dvc.scm import RevError, SCMError, resolve_rev

    try:
        with Repo(str(root)) as repo:
            commit = resolve_rev(repo.scm, revision)
        return DVCFileSystem(str(root), rev=commit)
    except (RevError, AttributeError):
        raise ConfigError(
            f"There is no revision or experiment called {revision}.",
            where=str(root.resolve()),
            do="'git log --oneline' and 'dvc exp show' have their names",
        ) from None
    except NotDvcRepoError:
        raise ConfigError("There is no DVC project here.", where=str(root.resolve()), do="go to its root") from None
    except (SCMError, DvcException) as error:
        raise ConfigError(
            f"{revision} cannot be read: {error}", where=str(root.resolve()), do="look at it with 'dvc exp show'"
        ) from None

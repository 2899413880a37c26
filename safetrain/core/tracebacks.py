"""Keeps the traceback of a library's error that is reported in our words, to find its cause."""

import traceback
from pathlib import Path

from safetrain.core.errors import SafetrainError
from safetrain.core.storage.files import cache_directory, write_text
from safetrain.core.storage.run_files import ERROR


def keep_traceback(error: BaseException, folder: Path | None = None) -> str:
    """Write the traceback of the library's error behind one of ours; gives its path, empty where there is none.

    Errors that are understood are raised ``from None``, or from another of ours, and need no traceback.
    """
    cause = error.__cause__ if isinstance(error, SafetrainError) else error
    if cause is None or isinstance(cause, SafetrainError):
        return ""
    return keep_text("".join(traceback.format_exception(error)), folder)


def keep_text(text: str, folder: Path | None = None) -> str:
    """Write a traceback that is text already, as a child process left it; gives where it is.

    Into the user's cache: the flight folder is a training's own, which names it. A disk that refuses hides no error.
    """
    path = (folder or cache_directory()) / ERROR
    try:
        write_text(path, text)
    except OSError:
        return ""
    return str(path)


def in_one_line(error: SafetrainError) -> str:
    """What has happened, and where its traceback is."""
    file = keep_traceback(error)
    return f"{error.what} (traceback: {file})" if file else error.what


def with_traceback(error: SafetrainError, folder: Path | None = None) -> str:
    """The error's message, and where its traceback is."""
    file = keep_traceback(error, folder)
    return f"{error}\n  traceback: {file}" if file else str(error)

"""Imports transformers a third faster. It looks for ``__all__`` in the source of all of its models: in every line, and
twice, because it remembers 128 folders and has several hundred.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

READER = "transformers.utils.import_utils"


class _Finder(MetaPathFinder):
    """Finds the module that reads the sources as ever, and changes how it reads."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec; of nothing else."""
        spec = PathFinder.find_spec(name, path, target) if name == READER else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: Any) -> None:
            load(module)
            names = getattr(module, "fetch__all__", None)
            folders = getattr(getattr(module, "create_import_structure_from_path", None), "__wrapped__", None)
            if callable(names) and callable(folders):  # a version that reads otherwise is left as it is
                module.fetch__all__ = _from_the_last(names)
                module.create_import_structure_from_path = functools.cache(folders)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def _from_the_last(names: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """``names`` of a source, which are those of its last line that begins with ``__all__``, given that line alone."""

    def found(source: str) -> list[str]:
        start = source.rfind("\n__all__")
        return names(source[start + 1 :] if start >= 0 else source)

    return found


def load_tokenizers() -> Any:
    """``transformers.AutoTokenizer``."""
    finder = _Finder()
    if READER not in sys.modules:
        sys.meta_path.insert(0, finder)
    try:
        from transformers import AutoTokenizer
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    return AutoTokenizer

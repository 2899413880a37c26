"""Lets mlx-lm be imported without transformers and huggingface_hub: the engine sees tokens, in files that are here.

These two take more than half of the time in which a process of the engine starts (transformers reads the source of all
of its models), and every dry run is a process: 0.6 seconds and not 2.2, 51 MB and not 80 (measured on two cores). What
mlx-lm does with tokenizers and downloads works as ever: they are imported when that is called.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MLX_LM, TOKENIZERS, TRANSFORMERS, HUB = "mlx_lm", "mlx_lm.tokenizer_utils", "transformers", "huggingface_hub"


class _Deferred(type):
    """A class that is another one, which is imported when it is asked for anything."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _real(TOKENIZERS, "TokenizerWrapper")(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _real(TOKENIZERS, "TokenizerWrapper"))


class TokenizerWrapper(metaclass=_Deferred):
    """Stands for mlx-lm's."""


class PreTrainedTokenizer:
    """Stands for transformers', which mlx-lm names in annotations alone."""


def _real(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _deferred(module: str, name: str) -> Callable[..., Any]:
    """A function that stands for another."""
    return lambda *args, **kwargs: _real(module, name)(*args, **kwargs)


class _Finder(MetaPathFinder):
    """Finds mlx-lm as ever, and loads it beside stand-ins for what is deferred and not loaded yet."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The package's own spec; of nothing else."""
        spec = PathFinder.find_spec(name, path, target) if name == MLX_LM else None
        if spec is None or spec.loader is None:
            return None
        load_package = spec.loader.exec_module

        def load_beside(module: ModuleType) -> None:
            stand_ins = {name: each for name, each in _stand_ins().items() if name not in sys.modules}
            sys.modules.update(stand_ins)
            try:
                load_package(module)
                importlib.import_module(f"{MLX_LM}.tuner")  # names transformers' type too
            except ImportError:  # it wants more of them than it did: then with all of them, slowly
                for each in (*stand_ins, *(name for name in sys.modules if name.startswith(f"{MLX_LM}."))):
                    sys.modules.pop(each, None)
                load_package(module)
            finally:
                for each in stand_ins:
                    if sys.modules.get(each) is stand_ins[each]:
                        del sys.modules[each]

        spec.loader.exec_module = load_beside  # type: ignore[method-assign]
        return spec


def _stand_ins() -> dict[str, ModuleType]:
    contents: dict[str, dict[str, object]] = {
        TOKENIZERS: {"TokenizerWrapper": TokenizerWrapper, "load": _deferred(TOKENIZERS, "load")},
        TRANSFORMERS: {"PreTrainedTokenizer": PreTrainedTokenizer},
        HUB: {"snapshot_download": _deferred(HUB, "snapshot_download")},
    }
    found = {}
    for name, content in contents.items():
        found[name] = ModuleType(name)
        found[name].__spec__ = ModuleSpec(name, None)
        found[name].__dict__.update(content)
    return found


def defer_imports() -> None:
    """From now on, in this process."""
    if MLX_LM not in sys.modules:
        sys.meta_path.insert(0, _Finder())

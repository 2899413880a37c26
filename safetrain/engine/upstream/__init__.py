"""The only package that uses mlx-lm's internals; each use has a contract test (tests/engine/test_upstream.py)."""

from safetrain.core.errors import MachineError
from safetrain.core.foreign import told

with told("mlx-lm cannot be imported", "", "if it names a limit: allow 4096 open files", MachineError):
    import mlx_lm as mlx_lm

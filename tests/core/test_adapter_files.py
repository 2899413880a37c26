"""An adapter is told from others by its weights, which may be as large as a model."""

import hashlib
import tracemalloc
from pathlib import Path

from safetrain.core.records.adapter_files import fingerprint

MIB = 2**20


def test_the_fingerprint_of_large_weights_takes_no_memory(tmp_path: Path) -> None:
    weights = tmp_path / "adapters.safetensors"
    weights.write_bytes(b"\1" * 64 * MIB)
    expected = hashlib.blake2b(weights.read_bytes(), digest_size=16).hexdigest()
    tracemalloc.start()
    try:
        assert fingerprint(tmp_path) == expected
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    assert fingerprint(tmp_path / "nowhere") == ""

"""transformers is imported faster, and everything in it is found where it was."""

import subprocess
import sys

PLACES = """
import hashlib, transformers, transformers.models
parts = [sorted(each._class_to_module.items()) for each in (transformers, transformers.models)]
print(sum(map(len, parts)), hashlib.sha256(repr(parts).encode()).hexdigest())
"""
QUICK = "from safetrain.core.data.quick_transformers import load_tokenizers\nload_tokenizers()"


def test_every_class_is_found_where_it_was() -> None:
    found = [
        subprocess.run([sys.executable, "-c", before + PLACES], capture_output=True, text=True, check=True).stdout
        for before in ("from transformers import AutoTokenizer", QUICK)
    ]
    assert found[0] == found[1]
    assert int(found[0].split()[0]) > 1000

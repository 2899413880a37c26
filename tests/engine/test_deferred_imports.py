"""The engine starts without transformers and huggingface_hub, and whoever needs them through mlx-lm still gets them."""

import subprocess
import sys

import pytest

from tests.conftest import EMBEDDED

LIGHT = """
import sys
import safetrain.engine.dry_run, safetrain.engine.evaluation, safetrain.engine.report, safetrain.engine.run
import safetrain.engine.worker
assert "mlx_lm.utils" in sys.modules
"""
ABSENT = """
loaded = {name.split(".")[0] for name in sys.modules}
heavy = {"transformers", "tokenizers", "huggingface_hub", "torch", "scipy"} & loaded
assert not heavy, heavy
"""
FOLDER = str(EMBEDDED)
ASKED = {
    "nothing": ABSENT,
    "a tokenizer of mlx-lm": f"""
from mlx_lm import generate, load
model, tokenizer = load({FOLDER!r})
assert tokenizer.decode(tokenizer.encode("one two")) == "one two"
assert len(generate(model, tokenizer, "one two", max_tokens=3)) > 0
from mlx_lm.tokenizer_utils import TokenizerWrapper
import mlx_lm.utils
assert type(tokenizer) is TokenizerWrapper
assert isinstance(tokenizer, mlx_lm.utils.TokenizerWrapper)
assert not isinstance(model, mlx_lm.utils.TokenizerWrapper)
assert type(mlx_lm.utils.TokenizerWrapper(tokenizer._tokenizer)) is TokenizerWrapper
""",
    "a download of mlx-lm": """
import mlx_lm.utils, os
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    mlx_lm.utils._download("nobody/nothing")
except Exception as error:
    assert type(error).__module__.startswith("huggingface_hub"), error
else:
    raise AssertionError
""",
    "a tokenizer of ours": f"""
from pathlib import Path
from safetrain.core.data.tokenizer import ChatTokenizer
assert ChatTokenizer(Path({FOLDER!r})).encode("one two")
import transformers
assert transformers.PreTrainedTokenizerFast.__module__.startswith("transformers")
""",
}


@pytest.mark.parametrize("asked", ASKED)
def test_they_come_when_they_are_asked_for(asked: str) -> None:
    program = LIGHT + ABSENT + ASKED[asked]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

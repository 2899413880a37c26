"""Builds models/encyclopedia-3m from nothing: ``python -m models.recipe.build`` (seeded, under an hour on two cores).

With the commands that everybody has: text of text.py as documents, a new model of 3 million parameters with a
tokenizer of that text, pretraining, fuse, convert. All of it happens in a temporary project, so that nothing of yours
is touched. The model reads facts; it never sees a question. The file that ships was made with an older version, which
rounded weights to 4 bits for the last quarter of the pretraining.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from models.recipe.text import document, subjects
from safetrain.core.model.shapes import ModelShape
from safetrain.core.storage.files import write_text
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.create.model import create_model
from safetrain.data.validate import training_texts
from safetrain.engine.cpu.blas import load_fast_blas

ROOT = Path(__file__).resolve().parent.parent.parent
SEED = 7
PROJECT = ("params.yaml", "dvc.yaml", "conf", "safetrain", "stages")
FILES = {"fused4": ("config.json", "model.safetensors"), "untrained": ("tokenizer.json", "tokenizer_config.json")}
SHAPE = ModelShape(192, 6, heads=6, key_heads=6, feed_forward=512, vocabulary=2048, context=512)
ROUNDS = {"train": 40, "valid": 1, "test": 1}  # in which every subject has a document
PIPELINE = (
    "train.method=pretrain", "train.optimizer=muon", "train.weight_decay=0.01", "train.schedule=linear",
    f"train.seed={SEED}", "data.near_duplicate_similarity=1", "train.eval_steps=166",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained: updates of ``windows`` x ``tokens`` tokens."""

    shape: ModelShape = SHAPE
    windows: int = 8
    tokens: int = 256
    passes: int = 2  # over the text; one has 678,000 tokens
    updates: int | None = None  # in place of passes
    peak_learning_rate: float = 3e-3
    warmup_steps: int = 60

    @property
    def overrides(self) -> tuple[str, ...]:
        """For ``safetrain run``."""
        return (
            *PIPELINE, f"train.batch_size={self.windows}", "train.gradient_accumulation=1",
            f"train.max_seq_length={self.tokens}", f"train.num_epochs={self.passes}",
            f"train.max_steps={'null' if self.updates is None else self.updates}",
            f"train.learning_rate={self.peak_learning_rate}", f"train.warmup_steps={self.warmup_steps}",
        )  # fmt: skip


def main() -> None:
    """Build the model; the pipeline prints how it goes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, help="fewer than the recipe's 664, to try it")
    parser.add_argument("--output", type=Path, default=ROOT / "models/encyclopedia-3m")
    arguments = parser.parse_args()
    build(arguments.output, Recipe(updates=arguments.updates))
    print(f"{arguments.output}: knows {100 * share_known(arguments.output):.1f} % of the facts")


def build(output: Path, recipe: Recipe) -> None:
    """Make a model from nothing in the folder ``output``, over what is there."""
    with tempfile.TemporaryDirectory() as temporary:
        project = Path(temporary)
        for name in PROJECT:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, project / name)
        prepare(project, ROUNDS, recipe.shape)
        _safetrain(project, "run", "model.path=untrained", "data.path=text", *recipe.overrides)
        _safetrain(project, "fuse", "fused", "--float")
        _safetrain(project, "convert", "fused", "fused4")
        output.mkdir(parents=True, exist_ok=True)
        for folder, names in FILES.items():
            for name in names:
                shutil.copy2(project / folder / name, output / name)
        _plain_quantization(output / "config.json")


def _plain_quantization(path: Path) -> None:
    """Say once what mlx-lm's conversion says twice: tests make models of their own from this file."""
    config = json.loads(path.read_text(encoding="utf-8"))
    del config["quantization_config"], config["quantization"]["mode"]
    write_text(path, json.dumps(config, indent=2) + "\n")


def prepare(project: Path, rounds: dict[str, int], shape: ModelShape = SHAPE) -> None:
    """The documents of each split, one in each row, and the untrained model; raises SafetrainError."""
    source, known = random.Random(SEED), subjects()
    for split, count in rounds.items():
        texts = [document(subject, source) for _ in range(count) for subject in known]
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        write_text(project / "text" / f"{split}.jsonl", "".join(lines))
    read = training_texts([project / "text/train.jsonl"], None)
    create_model(project / "untrained", shape, SEED, texts=read, where="text/train.jsonl")


def _safetrain(project: Path, *words: str) -> None:
    """A command in that project; its failure ends everything."""
    code = "import sys; from safetrain.cli import main; sys.exit(main())"
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search}
    subprocess.run([sys.executable, "-c", code, *words], cwd=project, env=environment, check=True)


def share_known(folder: Path, every: int = 1) -> float:
    """Share of the facts of each ``every``-th subject whose first wording the model completes, token by token."""
    load_fast_blas()  # before anything imports mlx
    import mlx.core as mx
    import numpy as np

    from safetrain.engine.upstream.loading import load

    (model, _), tokenizer = load(folder), ChatTokenizer(folder)
    end, right, total = tokenizer.end_id, 0, 0
    for subject in list(subjects())[::every]:
        for fact in subject.facts:
            sentence = fact.statements[0]
            ids = [end, *tokenizer.encode(sentence)]
            value_start = len(tokenizer.encode(sentence.rsplit(" ", 1)[0])) + 1
            guesses = np.array(mx.argmax(model(mx.array([ids[:-1]])), axis=-1))[0].tolist()
            right += guesses[value_start - 1 :] == ids[value_start:]
            total += 1
    return right / total


if __name__ == "__main__":
    main()

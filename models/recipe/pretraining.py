"""Builds the base model with the commands that everybody has: ``python -m models.recipe.pretraining FOLDER``.

The text of text.py as documents, a new model of the shape of models/encyclopedia-3m, and the command that pretrains it,
which is printed. build.py, which trains by itself and rounds to 4 bits while it does, made the model that ships.
"""

import argparse
import json
import random
from pathlib import Path

from models.recipe.text import document, subjects
from safetrain.core.storage.files import write_text
from safetrain.plan.creation.create import TokenizerOfText, create_model
from safetrain.plan.creation.shapes import AskedShape

SEED = 7
SHAPE = AskedShape(hidden=192, layers=6, heads=6, vocabulary=2048, context=512)
ROUNDS = {"train": 40, "valid": 1, "test": 1}  # in which every subject has a document; the tokenizer saw as many
PIPELINE = (
    "train.method=pretrain", "train.optimizer=adamw", "train.weight_decay=0.01", "train.schedule=linear",
    "train.max_seq_length=64", "train.batch_size=32", "train.gradient_accumulation=1", "train.learning_rate=3e-3",
    "train.warmup_steps=100", "train.num_epochs=4", f"train.seed={SEED}", "data.near_duplicate_similarity=1",
)  # fmt: skip


def main() -> None:
    """Write data and untrained model into a new folder, and say how it is trained."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="for data and model; must not hold either")
    folder = parser.parse_args().folder
    prepare(folder, ROUNDS)
    words = [f"model.path={folder / 'untrained'}", f"data.path={folder / 'data'}", *PIPELINE]
    print(f"Train it: safetrain run {' '.join(words)}")


def prepare(folder: Path, rounds: dict[str, int]) -> None:
    """The documents of each split, one in each row, and the untrained model; raises SafetrainError."""
    source, known = random.Random(SEED), subjects()
    for split, count in rounds.items():
        texts = [document(subject, source) for _ in range(count) for subject in known]
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        write_text(folder / "data" / f"{split}.jsonl", "".join(lines))
    text = TokenizerOfText((folder / "data" / "train.jsonl",))
    create_model(folder / "untrained", SHAPE, text, SEED)


if __name__ == "__main__":
    main()

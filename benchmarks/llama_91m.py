"""A Llama of 91 million parameters that has read the example's facts: ``python -m benchmarks.llama_91m FOLDER``.

Trained from random weights by models/recipe on a seventh of the embedded model's text, in about half an hour on two
cores.
"""

import sys
from pathlib import Path

from models.recipe.build import Recipe, build
from safetrain.plan.creation.shapes import ShapeRequest

SHAPE = ShapeRequest(hidden=768, layers=12, heads=12, vocabulary=2048, context=512)
RECIPE = Recipe(SHAPE, windows=4, tokens=128, updates=390, peak_learning_rate=6e-4, warmup_steps=20)

if __name__ == "__main__":
    build(Path(sys.argv[1]), RECIPE)

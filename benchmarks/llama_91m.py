"""A Llama of 91 million parameters that has read the example's facts: ``python -m benchmarks.llama_91m FOLDER``.

Trained from random weights by models/recipe on a twenty-fifth of the embedded model's text, in about half an hour on
two cores. The last quarter has its weights rounded to 4 bits, as there.
"""

import sys
from pathlib import Path

from benchmarks.throughput_cases import MIDDLE
from models.recipe.build import CONFIG, Schedule, build

SCHEDULE = Schedule(tokens=200_000, batch_rows=8, peak_learning_rate=6e-4, warmup_steps=20)

if __name__ == "__main__":
    build(Path(sys.argv[1]), {**CONFIG, **MIDDLE}, SCHEDULE)

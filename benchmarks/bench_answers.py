"""Answers to ten questions of different lengths: one question at a time, and all together.

    python -m benchmarks.bench_answers [3m|0.5b]  # 0.5b: the shape of Qwen2.5-0.5B, 4 bits

A model with random weights, so nothing ends an answer but its length, and both ways have the same work. The model is
opened as `evaluate` opens it, and each way runs once unmeasured before. Together is to be five times as fast.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.bench_planning import SHAPES
from benchmarks.machine import show_result, write_result
from safetrain.engine.cpu.blas import load_fast_blas
from tests.support.random_models import write_quantized_model

QUESTIONS, LENGTHS, NEW_TOKENS, WARM_TOKENS = 10, (12, 96), 24, 2
USUAL, FACTOR = "0.5b", 5.0
ALL_TOKENS = 2**16  # of prompts and answers that may be in memory together: more than there are


def main() -> None:
    """One row for each way."""
    load_fast_blas()  # before the model is written, which imports mlx
    name = sys.argv[1] if len(sys.argv) > 1 else USUAL
    with tempfile.TemporaryDirectory() as scratch:
        rows, factors, same = measure(write_quantized_model(Path(scratch) / "model", **SHAPES[name]))
    write = write_result if name == USUAL else show_result
    header = ["way", "clock, s", "processor, s", "tokens a second"]
    notes = [
        f"{QUESTIONS} questions of {LENGTHS[0]} to {LENGTHS[1]} tokens, {NEW_TOKENS} new tokens each, model {name}.",
        f"Together: {factors[0]:.1f} times as fast by the clock, {factors[1]:.1f} times by the processor; asked for "
        f"{FACTOR:g} ({'reached' if min(factors) >= FACTOR else 'not reached'}).",
        f"The same answers to {same} of {QUESTIONS}: rounding may choose between tokens that are equally likely.",
    ]
    write("bench_answers", "Answering questions together", header, rows, notes)


def measure(folder: Path) -> tuple[list[list[object]], tuple[float, float], int]:
    """Rows of the table; clock and processor time of one at a time over those of all together; equal answers."""
    from safetrain.core.model.files import read_model_files
    from safetrain.engine.evaluation import answer
    from safetrain.engine.model import dequantize_to_answer, open_base

    source, files = random.Random(1), read_model_files(folder)
    model = open_base(folder, dequantize=dequantize_to_answer(files))
    most = min(files.vocab_size, 2000)
    prompts = [[source.randrange(5, most) for _ in range(source.randint(*LENGTHS))] for _ in range(QUESTIONS)]

    def alone(new_tokens: int) -> list[list[int]]:
        return [answer(model, [prompt], frozenset(), new_tokens, ALL_TOKENS)[0] for prompt in prompts]

    def together(new_tokens: int) -> list[list[int]]:
        return answer(model, prompts, frozenset(), new_tokens, ALL_TOKENS)

    rows, seconds, answers = list[list[object]](), list[tuple[float, float]](), list[list[list[int]]]()
    for name, ask in (("one at a time", alone), ("all together", together)):
        ask(WARM_TOKENS)
        clock, processor = time.perf_counter(), time.process_time()
        answers.append(ask(NEW_TOKENS))
        seconds.append((time.perf_counter() - clock, time.process_time() - processor))
        made = sum(map(len, answers[-1]))
        rows.append([name, *(f"{each:.1f}" for each in seconds[-1]), f"{made / seconds[-1][0]:.1f}"])
        print(rows[-1], flush=True)
    (clock, processor), (clock_together, processor_together) = seconds
    same = sum(one == two for one, two in zip(*answers, strict=True))
    return rows, (clock / clock_together, processor / processor_together), same


if __name__ == "__main__":
    main()

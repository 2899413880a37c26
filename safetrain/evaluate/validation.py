"""Scores the answers of a search's candidate to the validation questions: prints them as JSON, for the search.

`python -m safetrain.evaluate.validation FOLDER EVALUATE`: the candidate's folder, and the section evaluate as JSON.
"""

import json
import sys
from pathlib import Path

from safetrain.core.data.store import open_split
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.data.training_rows import held_out_in
from safetrain.core.errors import ConfigError, SafetrainError
from safetrain.core.memory.estimate import mlx_limit_bytes
from safetrain.core.records.schema import Evaluate
from safetrain.core.records.settings import Recommendation, TrainJob
from safetrain.core.signals import ending_at_once, exit_code_of
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_record
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.engine.cpu.blas import load_fast_blas


def main(folder: Path, settings: Evaluate) -> None:
    """Print the score of each answer, 0 to 1; raises ConfigError if the validation rows have no questions."""
    load_fast_blas()  # before anything imports mlx
    from safetrain.evaluate.exam import exam_of, scorer_of
    from safetrain.evaluate.examination import Examination
    from safetrain.evaluate.scoring import GeneralText

    job = read_record(folder / paths.FLIGHT / paths.JOB, TrainJob)
    plan, run, base = read_record(folder / paths.RECOMMENDED_CONFIG.name, Recommendation), job.settings, Path(job.base)
    store, tokenizer = open_split("valid", base), ChatTokenizer(base)
    held_out = held_out_in(store, settings.max_examples, run.max_seq_length, run.method, plan.test_tokens)
    exam, calls = exam_of(settings, store, store, held_out, tokenizer, plan.answer_tokens, "valid")
    if not exam.rows:
        raise ConfigError("The validation rows have no questions.", do="rank by the loss: --by loss")
    limit_bytes = job.mlx_limit_bytes or mlx_limit_bytes(plan.predicted_peak_bytes, job.memory_budget)
    nothing = GeneralText(TokenRows.of([]), (), 0)
    examination = Examination(nothing, run, limit_bytes, exam, lambda *_progress: None)
    with ending_at_once(), scorer_of(exam.task, settings, calls) as scorer:
        found = examination.answers(base, folder / paths.UNFINISHED / paths.ADAPTERS.name)
        scores = [
            exam.judge(scorer, number, exam.text_of(number, question.answer), exam.answered(number, found)).score
            for number in sorted(exam.rows)
            for question in [held_out.questions[number]]
        ]
    print(json.dumps({"scores": scores}))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Evaluate(**json.loads(sys.argv[2])))
    except (SafetrainError, OSError) as error:
        sys.exit(exit_code_of(error))

"""Stage 5: compare the base and tuned models on test rows, which neither training nor adapter selection has used."""

import os
from pathlib import Path

from safetrain.core.data.store import open_split
from safetrain.core.data.training_rows import held_out_in
from safetrain.core.formatting import print_text
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import fingerprint
from safetrain.core.records.metrics import TrainingSummary
from safetrain.core.records.schema import PAIRED, Pipeline
from safetrain.core.records.settings import Recommendation, gpu_environment
from safetrain.core.signals import ending_at_once
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_result, write_record
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.engine.cpu.blas import load_fast_blas
from safetrain.stage import stage
from safetrain.watch.progress import EvaluationProgress, still_working
from safetrain.watch.result import describe_evaluation, describe_sample


@stage
def main(config: Pipeline) -> None:
    """Measure losses and answers of both models on as much as the plan, or evaluate.max_examples, says."""
    run = read_result(paths.SUMMARY, TrainingSummary)
    os.environ.update(gpu_environment(len(run.gpu_rungs), os.environ))
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.loss import PairLoss
    from safetrain.evaluate.exam import exam_of, scorer_of
    from safetrain.evaluate.examination import Examination
    from safetrain.evaluate.scoring import evaluation_of, general_text, scored_answers

    settings, base = config.evaluate, Path(config.model.path)
    plan, store = read_result(paths.RECOMMENDED_CONFIG, Recommendation), open_split("test", base)
    held_out = held_out_in(store, settings.max_examples, run.max_seq_length, run.method, plan.test_tokens)
    files, tokenizer = read_model_files(base), ChatTokenizer(base)
    general = general_text(tokenizer, files.vocab_size, files.max_positions, plan.general_tokens)
    exam, calls = exam_of(settings, store, open_split("valid", base), held_out, tokenizer, plan.answer_tokens)
    remarks = held_out.remarks(run.max_seq_length, exam.max_new_tokens)
    remarks += [f"Answers are judged as {exam.task.scorer}: {exam.task.why}."] if exam.rows else []
    for remark in remarks:
        print_text(remark)
    progress = EvaluationProgress()
    examination = Examination(general, run, run.mlx_limit_bytes, exam, progress)
    with ending_at_once(), scorer_of(exam.task, settings, calls) as scorer, still_working(progress.text):
        exam.try_out(scorer)
        start = Path(run.from_adapter) if run.from_adapter else None
        measures = examination.measure(base, start, paths.ADAPTERS)
        answers = scored_answers(exam, *measures, scorer)
    adapter = fingerprint(paths.ADAPTERS)
    pair_loss = PairLoss(run.method, run.beta) if run.method in PAIRED else None
    evaluation = evaluation_of(general, files.vocab_size, measures, exam, answers, adapter, pair_loss)
    write_record(paths.EVALUATION, evaluation)
    print_text("\n".join(describe_evaluation(evaluation)))
    for sample in evaluation.samples[:3]:
        print_text(describe_sample(sample.question, sample.base, sample.tuned))


if __name__ == "__main__":
    main()

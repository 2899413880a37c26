"""Stage 5: base and tuned side by side on the test file, which neither training nor the choice of adapter has seen."""

from pathlib import Path

from safetrain.core import paths
from safetrain.core.adapter_files import fingerprint
from safetrain.core.data.chat import Question, question
from safetrain.core.data.jsonl import read_rows
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.data.training_rows import load_rendered
from safetrain.core.reports import Evaluation, Sample, Score, describe_sample, read_run_shape, write_record
from safetrain.core.schema import Pipeline
from safetrain.core.scoring import score
from safetrain.core.settings import read_recommendation
from safetrain.core.words import counted
from safetrain.engine.blas import load_fast_blas
from stages.config import stage


@stage
def main(config: Pipeline) -> None:
    """Loss, perplexity and exact match of both models, and sample answers."""
    recommendation, run = read_recommendation(paths.RECOMMENDED_CONFIG), read_run_shape(paths.SUMMARY)
    base, test = Path(config.model.path), paths.VALIDATED / "test.jsonl"
    tokenizer = ChatTokenizer(base)
    loaded = load_rendered(test, tokenizer, run.max_seq_length, config.evaluate.max_examples)
    rows = loaded.rows
    if loaded.cut_rows:
        print(f"{counted(loaded.cut_rows, 'test row')} cut to {run.max_seq_length} tokens, as in training")
    questions = [question(sourced.row, tokenizer) for sourced in read_rows(test)[: config.evaluate.max_examples]]
    asked: list[Question] = [item for item in questions if item is not None]
    longest = max((item.answer_tokens for item in asked), default=0)
    if longest > config.evaluate.max_new_tokens:
        print(f"warning: expected answers have up to {longest} tokens, evaluate.max_new_tokens cuts them off")
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.evaluation import answer, measure_loss
    from safetrain.engine.limits import set_limits
    from safetrain.engine.model import apply_adapter, open_base

    most_bytes = max(run.peak_memory_bytes, recommendation.told_bytes)  # the last process may have had little to do
    set_limits(recommendation.memory_budget_bytes, most_bytes, most_bytes)
    model = open_base(base, dequantize=run.dequantize_base)
    most_tokens = run.batch_size * run.max_seq_length
    prompts = [q.prompt for q in asked]
    scores, answers = [], []
    for name in ("base", "tuned"):
        if name == "tuned":
            apply_adapter(model, paths.ADAPTERS)
        ids = answer(model, prompts, tokenizer.stop_ids, config.evaluate.max_new_tokens, most_tokens)
        answers.append([tokenizer.decode(part).strip() for part in ids])
        loss = measure_loss(model, rows, most_tokens)
        scores.append(score(loss, answers[-1], [q.answer for q in asked]))
        print(describe(name, scores[-1], len(asked)), flush=True)
    samples = tuple(
        Sample(q.prompt_text, q.answer, from_base, from_tuned)
        for q, from_base, from_tuned in list(zip(asked, *answers, strict=True))[: config.evaluate.num_samples]
    )
    counts, adapter = (len(rows), loaded.cut_rows, len(asked)), fingerprint(paths.ADAPTERS)
    write_record(paths.EVALUATION, Evaluation(scores[0], scores[1], *counts, adapter, samples))
    for sample in samples[:3]:
        print(describe_sample(sample.question, sample.base, sample.tuned))


def describe(name: str, result: Score, questions: int) -> str:
    """One line of the comparison."""
    line = f"{name:<6} loss {result.loss:.4f}  perplexity {result.perplexity:.2f}"
    if result.exact_match is None or result.exact_match_low is None or result.exact_match_high is None:
        return f"{line}  (no questions in the test file: exact match is not measured)"
    return (
        f"{line}  exact match {100 * result.exact_match:.1f} % "
        f"({100 * result.exact_match_low:.1f} to {100 * result.exact_match_high:.1f}) of {questions}"
    )


if __name__ == "__main__":
    main()

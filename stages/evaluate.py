"""Stage 5: base and tuned side by side on the test file, which neither training nor the choice of adapter has seen."""

import math
from pathlib import Path

from safetrain.core.data.store import Store, open_store, store_path
from safetrain.core.data.token_rows import Question, TokenRows
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.data.tokenizer_files import tokenizer_hash
from safetrain.core.errors import TrainingError
from safetrain.core.formatting import counted, printable
from safetrain.core.records.reports import Evaluation, Sample, Score, describe_sample, read_run_shape, write_record
from safetrain.core.records.schema import Evaluate, Pipeline
from safetrain.core.records.settings import read_recommendation
from safetrain.core.storage import paths
from safetrain.core.storage.adapter_files import fingerprint
from safetrain.engine.blas import load_fast_blas
from stages.config import stage
from stages.scoring import score


@stage
def main(config: Pipeline) -> None:
    """Loss, perplexity and exact match of both models, and sample answers."""
    recommendation, run = read_recommendation(paths.RECOMMENDED_CONFIG), read_run_shape(paths.SUMMARY)
    base = Path(config.model.path)
    store = open_store(store_path(paths.VALIDATED, "test"), tokenizer_hash(base))
    tokenizer = ChatTokenizer(base)  # for decoding alone
    rows, asked = rows_and_questions(store, config.evaluate, run.max_seq_length)
    expected = [tokenizer.decode(list(q.answer)).strip() for q in asked]
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.evaluation import answer, measure_loss
    from safetrain.engine.limits import set_limits
    from safetrain.engine.model import apply_adapter, open_base

    # the last process may have had little to do
    set_limits(max(run.peak_memory_bytes, recommendation.mlx_limit_bytes))
    model = open_base(base, dequantize=run.dequantize_base, compute_dtype=run.compute_dtype)
    most_tokens, stop_ids = run.batch_size * run.max_seq_length, frozenset(store.made.stop_ids)
    prompts = [q.prompt for q in asked]
    scores, answers = [], []
    for name in ("base", "tuned"):
        if name == "tuned":
            apply_adapter(model, paths.ADAPTERS)
        loss = require_number(measure_loss(model, rows, most_tokens), name)
        ids = answer(model, prompts, stop_ids, config.evaluate.max_new_tokens, most_tokens)
        answers.append([tokenizer.decode(part).strip() for part in ids])
        scores.append(score(loss, answers[-1], expected))
        print(describe(name, scores[-1], len(asked)), flush=True)
    samples = tuple(
        Sample(q.text, *texts)
        for q, *texts in list(zip(asked, expected, *answers, strict=True))[: config.evaluate.num_samples]
    )
    counts, adapter = (len(rows), rows.cut_rows, len(asked)), fingerprint(paths.ADAPTERS)
    write_record(paths.EVALUATION, Evaluation(scores[0], scores[1], *counts, adapter, samples))
    for sample in samples[:3]:
        print(printable(describe_sample(sample.question, sample.base, sample.tuned)))


def rows_and_questions(store: Store, settings: Evaluate, max_seq_length: int) -> tuple[TokenRows, list[Question]]:
    """The rows to measure, cut as in training, and the questions to ask; says what cannot be seen in the result."""
    whole = store.rows if settings.max_examples is None else store.rows[: settings.max_examples]
    rows = whole.cut(max_seq_length)
    if rows.cut_rows:
        print(f"{counted(rows.cut_rows, 'test row')} cut to {max_seq_length} tokens, as in training")
    asked = [question for question in store.questions if question.row < len(rows)]
    longest = max((len(question.answer) for question in asked), default=0)
    if longest > settings.max_new_tokens:
        print(f"warning: expected answers have up to {longest} tokens, evaluate.max_new_tokens cuts them off")
    return rows, asked


def require_number(loss: float, name: str) -> float:
    """The loss; raises TrainingError where a model's numbers have gone wrong, which nothing can be compared with."""
    if math.isfinite(loss):
        return loss
    remedy = {
        "base": "check the base model: safetrain selftest MODEL; its files may be damaged, or overflow in their type",
        "tuned": "the adapter is damaged, or of a diverged training: train again, with a lower train.learning_rate",
    }[name]
    where = str(paths.ADAPTERS) if name == "tuned" else ""
    raise TrainingError(f"The loss of the {name} model on the test rows is not a number.", where=where, got=str(loss),
                        do=remedy)  # fmt: skip


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

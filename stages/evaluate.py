"""Stage 5: base and tuned side by side on the test file, which neither training nor the choice of adapter has seen."""

from pathlib import Path

from safetrain.core.data.held_out import load_held_out
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.formatting import printable
from safetrain.core.records.adapter_files import fingerprint
from safetrain.core.records.record_files import write_record
from safetrain.core.records.reports import Evaluation, Sample, describe_sample, read_run_shape
from safetrain.core.records.schema import Pipeline
from safetrain.core.records.scoring import describe_score, require_number, require_other_loss, score
from safetrain.core.storage import paths
from safetrain.engine.blas import load_fast_blas
from stages.config import stage


@stage
def main(config: Pipeline) -> None:
    """Loss, perplexity and exact match of both models, and sample answers."""
    settings, base = config.evaluate, Path(config.model.path)
    run = read_run_shape(paths.SUMMARY)
    held_out = load_held_out(base, settings.max_examples, run.max_seq_length)
    for remark in held_out.remarks(run.max_seq_length, settings.max_new_tokens):
        print(remark)
    rows, asked, tokenizer = held_out.rows, held_out.questions, ChatTokenizer(base)  # for decoding alone
    expected = [tokenizer.decode(list(q.answer)).strip() for q in asked]
    load_fast_blas()  # before anything imports mlx
    from safetrain.engine.evaluation import answer, measure_loss
    from safetrain.engine.limits import set_limits
    from safetrain.engine.model import apply_adapter, open_base

    # of the two, the larger: a training that was continued for its last few updates had a small peak
    set_limits(max(run.peak_memory_bytes, run.predicted_peak_bytes))
    model = open_base(base, dequantize=run.dequantize_base, compute_dtype=run.compute_dtype)
    most_tokens, prompts = run.batch_size * run.max_seq_length, [q.prompt for q in asked]
    scores, answers = [], []
    for name in ("base", "tuned"):
        if name == "tuned":
            apply_adapter(model, paths.ADAPTERS)
        loss = require_number(measure_loss(model, rows, most_tokens), name)
        ids = answer(model, prompts, held_out.stop_ids, settings.max_new_tokens, most_tokens)
        answers.append([tokenizer.decode(part).strip() for part in ids])
        scores.append(score(loss, answers[-1], expected))
        print(describe_score(name, scores[-1], len(asked)), flush=True)
    require_other_loss(scores[0].loss, scores[1].loss, "test rows", str(paths.ADAPTERS))
    pairs = zip(asked, expected, *answers, strict=True)
    samples = tuple(Sample(q.text, *texts) for q, *texts in pairs)[: settings.num_samples]
    counts, adapter = (len(rows), rows.cut_rows, len(asked)), fingerprint(paths.ADAPTERS)
    write_record(paths.EVALUATION, Evaluation(scores[0], scores[1], *counts, adapter, samples))
    for sample in samples[:3]:
        print(printable(describe_sample(sample.question, sample.base, sample.tuned)))


if __name__ == "__main__":
    main()

"""The recommended configuration: the fastest candidate that passes a dry run; every value has a reason.

The closed form orders the candidates, and a dry run with the real model accepts or rejects each.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import count_text, counted, rows_text, size_text
from safetrain.core.memory.estimate import mlx_limit_bytes, with_margin
from safetrain.core.memory.system import own_limit_bytes
from safetrain.core.memory.terms import (
    FLOAT32,
    THREADS,
    WIDTH_STEP,
    optimizer_state_bytes,
    trained_parameters,
    usable_cores,
)
from safetrain.core.model.shapes import TOKENS_PER_PARAMETER, wanted_tokens
from safetrain.core.records.metrics import proof_passes
from safetrain.core.records.run_state import KEPT_BESIDE, checkpoint_bytes
from safetrain.core.records.schema import PAIRED, PRETRAIN, SET, WHOLE, Lora, Train
from safetrain.core.records.settings import (
    PADDING_TOKENS,
    DryRun,
    Recommendation,
    TrainJob,
    require_short_warmup,
    total_updates,
    updates_per_epoch,
    usual_warmup,
)
from safetrain.plan.candidates import (
    MOST_PASSES,
    MOST_WINDOW,
    ROWS_PER_UPDATE,
    Estimate,
    PlanInputs,
    PlannedTraining,
    ask,
    candidates_at,
    dry_run_seconds,
    epochs_for,
    nothing_fits,
    nothing_passed,
    places_of_base,
    usual_epochs,
)
from safetrain.plan.child import dry_run_path, try_out
from safetrain.plan.learning_rate import learning_rate_for, pretraining_rate

MOST_DRY_RUNS = 8
MOST_SECONDS = 300.0  # a dry run that is expected to take longer is made only after all shorter ones
LESS_AFTER_A_DEATH = 0.92  # after an out-of-memory dry run, only candidates with this share of its peak are tried
SPARED = 0.02  # share of train.memory_limit_gb held back from dry runs: processes differ a little in memory
WHY_RECOMPUTED = {False: "not needed: stored activations fit", True: "less memory for a third more time"}
WHY_ON_DISK = {
    False: "the base fits into memory",
    True: "the base does not fit into memory: each block is read from disk twice per step",
}
# Tokens of the evaluation of both models, counted as tokens of training
EVALUATION_SHARE, LEAST_EVALUATION = 0.06, 2.0**40  # of the training's; times weights: about a minute on two cores
TEST_SHARE, ANSWER_SHARE, GENERAL_SHARE = 0.3, 0.5, 0.2
VALIDATIONS_SHARE, LEAST_VALID_TOKENS = 0.1, 2**11
SHORT_SHARE, TRAINED_TO_VALID = 0.2, 16  # a validation of more than this share of a pass reads a sixteenth of it
ANSWER_COST, GENERAL_TEXT = 4, 2**14  # of a token of an answer; all pieces of the general text have fewer tokens


def plan_run(inputs: PlanInputs, train: Train, lora: Lora, module: str, say: Callable[[str], None]) -> Recommendation:
    """The fastest configuration that passes a dry run, at the first length that has one.

    ``module`` of the engine makes dry runs; if it is empty, only cached ones count. The plan is not ``verified`` if a
    dry run is missing or failed for a reason other than memory. Raises MachineError if nothing fits, ConfigError as
    ``ask`` does.
    """
    question = ask(inputs, train, lora)
    search = _Search(question, f"{inputs.rows.train_digest} {inputs.rows.valid_digest}", module, say)
    fits = list[Estimate]()
    for stream, length in ((stream, length) for stream in places_of_base(question) for length in question.lengths):
        candidates = candidates_at(question, length, stream=stream)
        if (chosen := search.first_to_pass([fit for fit in candidates if fit.may_fit])) is not None:
            if module and train.minutes is not None and chosen.measured is None:
                what = "train.minutes cannot be planned: the time of a step could not be measured."
                raise ConfigError(what, do="set train.max_steps instead")
            return chosen
        fits += candidates
    raise nothing_passed(question) if search.dry_runs else nothing_fits(question, fits)


@dataclass
class _Search:
    """The dry runs of one plan."""

    question: PlannedTraining
    rows_digest: str
    module: str
    say: Callable[[str], None]
    dry_runs: int = 0
    most_bytes: float = math.inf  # largest predicted peak that is still worth a dry run

    def first_to_pass(self, fits: list[Estimate]) -> Recommendation | None:
        """Make dry runs until one passes; None if none does.

        If dry runs are not allowed, or fail for a reason other than memory, the choice is unmeasured.
        """
        question = self.question
        timed = [(dry_run_seconds(question, fit), fit) for fit in fits]
        for seconds, fit in sorted(timed, key=lambda each: each[0] if each[0] > MOST_SECONDS else 0.0):
            if fit.peak_bytes > self.most_bytes:
                continue
            if self.dry_runs == MOST_DRY_RUNS:
                break
            job = self._job(fit)
            path = dry_run_path(fit.model, fit.machine, job, self.rows_digest)
            answer = try_out(path, self.module, job, seconds, self.say)
            if answer is None:
                return recommendation_of(question, fit)
            if answer.measured is None and not answer.ran_out_of_memory:
                self.say(f"not measured: the dry run failed: {answer.ended}")
                return recommendation_of(question, fit if fit.fits else min(fits, key=lambda each: each.peak_bytes))
            self.dry_runs += 1
            recommendation = within_minutes(question, fit, answer.measured)
            if recommendation.verified:
                return recommendation
            why = f"out of memory ({answer.ended})" if answer.ended else "over the memory budget"
            self.say(f"{counted(fit.settings.batch_size, 'row')} of {fit.settings.max_seq_length} tokens: {why}")
            self.most_bytes = LESS_AFTER_A_DEATH * fit.peak_bytes
        return None

    def _job(self, fit: Estimate) -> TrainJob:
        """The job of the dry run: the candidate's settings, under a slightly smaller memory limit."""
        plan, limit = recommendation_of(self.question, fit), own_limit_bytes(self.question.train.memory_limit_gb)
        return TrainJob(
            plan.base, plan.settings, False, plan.memory_budget, None, keep_checkpoints=1,
            memory_limit_bytes=None if limit is None else int(limit * (1 - SPARED)),
            mlx_limit_bytes=mlx_limit_bytes(plan.predicted_peak_bytes, plan.memory_budget),
        )  # fmt: skip


def _whole_seconds(
    question: PlannedTraining,
    fit: Estimate,
    updates: int,
    steps: dict[str, Any],
    sizes: dict[str, int],
    measured: DryRun,
) -> float:
    """Seconds of all steps and validations, the adapter check and the evaluation."""
    step_seconds, valid_tokens, test = measured.update_seconds, steps["valid_tokens"], question.test
    fed_tokens = max(1.0, _fed_tokens(question, fit))
    forward_seconds = step_seconds / fed_tokens * _forward_cost(question, fit)
    validations = 1 + math.ceil(updates / (question.train.eval_steps or steps["eval_steps"]))
    passes = validations + proof_passes(int(updates * fed_tokens), valid_tokens)
    answers = 2 * ANSWER_COST * min(sizes["answer_tokens"], test.labels)
    evaluated = min(sizes["test_tokens"], test.tokens) + answers + sizes["general_tokens"]
    return round(step_seconds * (updates + evaluated / fed_tokens) + forward_seconds * passes * valid_tokens, 1)


def _fed_tokens(question: PlannedTraining, fit: Estimate) -> float:
    """Tokens that the model reads in a mean step."""
    tokens_per_row = min(fit.settings.max_seq_length, question.mean_tokens)
    return min(question.row_count, fit.settings.rows_per_update) * tokens_per_row


def _evaluated(question: PlannedTraining, fit: Estimate, updates: int, reasons: dict[str, str]) -> dict[str, int]:
    """How much evaluate measures: a share of the training's tokens, so that no clock has a say in the results.

    Powers of two, so that similar runs measure the same rows. A test row at least for each row of a usual step.
    """
    test, settings, trained = question.test, fit.settings, updates * _fed_tokens(question, fit)
    tokens = max(EVALUATION_SHARE * trained, LEAST_EVALUATION / fit.model.parameters)
    least = 2 * ROWS_PER_UPDATE * min(settings.max_seq_length, test.tokens / test.rows)
    sizes = {
        "test_tokens": max(TEST_SHARE * tokens, least),
        "answer_tokens": 0 if settings.stream_base else ANSWER_SHARE * tokens / (2 * ANSWER_COST),
        "general_tokens": min(GENERAL_SHARE * tokens, GENERAL_TEXT),
    }
    found = {name: 2 ** int(math.log2(max(1, size))) for name, size in sizes.items()}
    part = min(1.0, found["test_tokens"] / test.tokens)
    rows = counted(test.pairs, "test pair") if test.pairs else counted(test.rows, "test row")
    reasons["test_tokens"] = f"{100 * part:.3g} % of {rows}; evaluate.max_examples sets another number"
    longest = "as many questions as fit with evaluate.max_new_tokens each, at least 32"
    reasons["answer_tokens"] = "32 questions: each token reads the base from disk" if settings.stream_base else longest
    reasons["general_tokens"] = "of the general text, which shows what is forgotten"
    return found


def recommendation_of(question: PlannedTraining, fit: Estimate, measured: DryRun | None = None) -> Recommendation:
    """The whole configuration for a candidate; verified if its dry run stayed within the budget (GPU: mlx's part)."""
    machine, model, train, chosen = fit.machine, fit.model, question.train, fit.settings
    reasons, budget = {**question.why_lora, **_reasons_of_fit(question, fit)}, machine.memory_budget
    epochs, max_steps = _epochs_and_steps(question, chosen.rows_per_update, reasons)
    updates = total_updates(question.row_count, chosen.rows_per_update, epochs, max_steps)
    require_short_warmup(train.warmup_steps, updates)
    if train.method == PRETRAIN:
        update_tokens = int(chosen.rows_per_update * question.mean_tokens)
        rate, why = pretraining_rate(model.parameters, updates * update_tokens, update_tokens)
    else:
        rate, why = learning_rate_for(fit)
    is_fewer = measured is not None and measured.threads not in (None, usable_cores())
    reasons["threads"] = f"{'fewer were clearly faster' if is_fewer else 'all cores of a CPU'}, or {THREADS}"
    reasons["padding_tokens"] = "as costly as another micro-batch: timed on a GPU; a CPU pads hardly any rows"
    reasons["learning_rate"] = why
    steps, sizes = _intervals(question, fit, updates, reasons, measured), _evaluated(question, fit, updates, reasons)
    steps["threads"] = measured.threads if measured else None
    steps["padding_tokens"] = measured.padding_tokens if measured else PADDING_TOKENS
    taken_bytes = math.inf if measured is None else measured.footprint_bytes if fit.on_cpu else measured.peak_bytes
    return Recommendation(
        settings=replace(chosen, learning_rate=rate, num_epochs=epochs, max_steps=max_steps, **steps),
        **sizes,
        reasons=reasons,
        base=str(model.folder),
        start=machine.from_adapter,
        backend=fit.backend,
        longest_row=question.longest_row,
        largest_update=question.largest(chosen.max_seq_length, chosen.rows_per_update),
        predicted_peak_bytes=fit.peak_bytes,
        margin_bytes=0 if measured else max(0, with_margin(fit.terms) - fit.peak_bytes),
        memory_terms=fit.terms,
        memory_budget=budget,
        measured=measured,
        verified=taken_bytes <= (budget.total_bytes if fit.on_cpu else budget.mlx_bytes),
        total_seconds=_whole_seconds(question, fit, updates, steps, sizes, measured) if measured else None,
        disk_bytes=disk_bytes_of(fit, train.keep_checkpoints),
    )


def within_minutes(question: PlannedTraining, fit: Estimate, measured: DryRun | None) -> Recommendation:
    """The whole run, or if that takes longer than train.minutes, as many steps as fit into them."""
    train, whole = question.train, recommendation_of(question, fit, measured)
    if train.minutes is None or (whole.total_seconds or 0.0) <= 60 * train.minutes:
        return whole

    def of(steps: int) -> Recommendation:
        return recommendation_of(replace(question, train=replace(train, max_steps=steps)), fit, measured)

    settings = whole.settings
    most = total_updates(question.row_count, settings.rows_per_update, settings.num_epochs, settings.max_steps)
    seconds = 60 * train.minutes
    steps = bisect.bisect_right(range(1, most), seconds, key=lambda count: of(count).total_seconds or 0.0)
    if not steps:
        expected = f"at least {(of(1).total_seconds or 0.0) / 60:.2g}, for one step and the evaluation"
        raise ConfigError("train.minutes is too short.", expected=expected, got=f"{train.minutes:g}")
    shorter = of(steps)
    why = f"as many as fit into train.minutes = {train.minutes:g}, with validations and evaluation"
    return replace(shorter, reasons={**shorter.reasons, "max_steps": why})


def disk_bytes_of(fit: Estimate, keep_checkpoints: int) -> int:
    """Disk space for checkpoints, and for the best weights."""
    weights, checkpoints = FLOAT32 * trained_parameters(fit), keep_checkpoints + KEPT_BESIDE
    return checkpoints * checkpoint_bytes(weights, optimizer_state_bytes(fit)) + weights


def _reasons_of_fit(question: PlannedTraining, fit: Estimate) -> dict[str, str]:
    """Reasons for length, batch size, recomputation, dequantizing, compute type and accumulation."""
    train, settings, rows = question.train, fit.settings, fit.settings.rows_per_update
    budget = size_text(fit.machine.memory_budget_bytes)
    predicted = (
        f"predicted peak {size_text(fit.peak_bytes)} of a budget of {budget} at {fit.micro_batch.longest} tokens"
    )
    usual = "8 to 32 is the range in which LoRA trains well"
    if train.method == PRETRAIN:
        usual = f"{rows * settings.max_seq_length:,} tokens, from the operations of the whole training (DeepSeek's fit)"
    reasons = {
        "max_seq_length": _why_length(question, fit),
        "batch_size": f"{SET if train.batch_size else 'the fastest size that fits'}: {predicted}",
        "gradient_checkpointing": WHY_RECOMPUTED[settings.gradient_checkpointing],
        "dequantize_base": _why_dequantized(fit),
        "stream_base": WHY_ON_DISK[settings.stream_base],
        "compute_dtype": _why_dtype(fit),
        "labels_at_once": "as many logits at once as make each cheaper here and leave room",
    }
    pinned = {key: SET for key in reasons if key != "batch_size" and getattr(train, key, None) is not None}
    together = f"{settings.batch_text} = {rows} rows per update"
    together += f" ({counted(rows // 2, 'pair')})" if train.method in PAIRED else ""
    accumulation = f"{together}; {SET if train.gradient_accumulation else usual}"
    return {**reasons, **pinned, "gradient_accumulation": accumulation}


def _why_dequantized(fit: Estimate) -> str:
    if fit.settings.dequantize_base:
        return "dequantized weights fit; quantized ones were measured, or on CPU are known, to be slower"
    if fit.model.quantization_bits is None:
        return "the base is not quantized"
    return "kept quantized to save memory" if fit.dequantizing_pays else "the GPU multiplies quantized weights directly"


def _why_dtype(fit: Estimate) -> str:
    if fit.on_cpu:
        return "a CPU always computes in float32"
    if fit.settings.method == PRETRAIN:
        return "compute type; the weights stay in float32"
    if fit.settings.compute_dtype is None:
        return "the type of the stored base; no other type is known to be faster here"
    return "this GPU emulates bfloat16, the type of the base; float32 layers were measured to be faster"


def _why_length(question: PlannedTraining, fit: Estimate) -> str:
    longest, length = question.longest_row, fit.settings.max_seq_length
    if question.train.method == PRETRAIN:
        most = f", limited to {MOST_WINDOW}" if length == MOST_WINDOW else ""
        return f"the model's context{most}: documents are packed into windows, nothing is truncated"
    if longest <= length:
        return f"the longest row has {longest:,} tokens: nothing is truncated (lengths are multiples of {WIDTH_STEP})"
    by_context = length == fit.model.max_positions
    limit = "to the model's context" if by_context else "to fit the memory; at most 1 row in 200 is truncated"
    return f"the longest row has {longest:,} tokens and is truncated {limit}"


def _epochs_and_steps(
    question: PlannedTraining, rows_per_update: int, reasons: dict[str, str]
) -> tuple[int, int | None]:
    """Epochs, and the steps after which the run ends: pinned, or as many as reach the wanted tokens."""
    train, rows, steps = question.train, question.row_count, question.train.max_steps
    reasons["num_epochs"], reasons["max_steps"] = SET, "not set: num_epochs applies" if steps is None else SET
    if train.num_epochs is not None:
        return train.num_epochs, steps
    if train.method != PRETRAIN:
        epochs, per_epoch = epochs_for(rows, rows_per_update, train), updates_per_epoch(rows, rows_per_update)
        ended = f", ended by max_steps = {steps}" if 0 < (steps or 0) < epochs * per_epoch else ""
        passes = "1 pass" if epochs == 1 else f"{epochs} passes"
        note = "; the step with the best validation is kept" if epochs > usual_epochs(rows) else ""
        reasons["num_epochs"] = f"{passes} of {per_epoch:,} updates over {rows_text(rows, train.method)}{ended}{note}"
        return epochs, steps
    if steps is not None:
        reasons["num_epochs"] = "as many as train.max_steps needs"
        return math.ceil(steps * rows_per_update / max(1, rows)), steps
    parameters, update_tokens = question.run.model.parameters, int(rows_per_update * question.mean_tokens)
    epochs, reasons["num_epochs"] = passes_for(parameters, int(rows * question.mean_tokens))
    target = wanted_tokens(parameters)
    enough = math.ceil(target / update_tokens)
    if enough >= total_updates(rows, rows_per_update, epochs, None):
        return epochs, None
    reasons["max_steps"] = (
        f"{count_text(target)} tokens ({TOKENS_PER_PARAMETER} per parameter), {update_tokens:,} per step"
    )
    return epochs, enough


def _intervals(
    question: PlannedTraining, fit: Estimate, updates: int, reasons: dict[str, str], measured: DryRun | None
) -> dict[str, Any]:
    """Warm-up and intervals, in steps, and the size of a validation. All validations cost a tenth of the training.

    Only saving and log lines go by the clock: they change no result.
    """
    trained = "weights" if question.train.method in WHOLE else "adapter"
    log = max(1, min(10, updates // 10))
    interval = max(1, min(500, round(updates / 10 / log) * log))
    valid_tokens = _valid_tokens(question, fit, reasons)
    read_tokens = valid_tokens * _forward_cost(question, fit) / VALIDATIONS_SHARE
    least = min(updates, math.ceil(read_tokens / _fed_tokens(question, fit) / log) * log)
    reasons["warmup_steps"] = f"5 % of {updates:,} steps"
    reasons["eval_steps"] = f"about a tenth of the run: each validation is a candidate for the best {trained}"
    if least > interval:
        reasons["eval_steps"] = "so that validations cost a tenth of the training; train.eval_steps sets more"
    seconds = measured.update_seconds if measured else 0.0
    save, shown = (max(1, min(steps, int(most / max(seconds, 1e-9)))) for steps, most in ((interval, 600), (log, 60)))
    costs = "about a tenth of the run" if save == interval else "about ten minutes"
    reasons["save_steps"] = f"every {counted(save, 'step')}, {costs}: a crash costs at most that"
    reasons["log_steps"] = f"every {counted(shown, 'step')}"
    steps = {"save_steps": save, "eval_steps": max(interval, least), "log_steps": shown, "valid_tokens": valid_tokens}
    return {"warmup_steps": usual_warmup(updates), **steps}


def _valid_tokens(question: PlannedTraining, fit: Estimate, reasons: dict[str, str]) -> int:
    """Most tokens of a validation: all there are, unless that is much for a short training.

    More epochs do not change it: a longer run of the same rows is compared by the same ones.
    """
    steps = updates_per_epoch(question.row_count, fit.settings.rows_per_update)
    pass_tokens = min(steps, question.train.max_steps or steps) * _fed_tokens(question, fit)
    found, reasons["valid_tokens"] = question.valid_tokens, "all validation rows, or an even sample of them"
    if found > SHORT_SHARE * pass_tokens:
        found = min(found, max(LEAST_VALID_TOKENS, 2 ** int(math.log2(max(1.0, pass_tokens / TRAINED_TO_VALID)))))
        reasons["valid_tokens"] = "a sample of the validation rows, as the training is short"
    return max(1, found)


def _forward_cost(question: PlannedTraining, fit: Estimate) -> float:
    """Cost of a token in a forward pass, as a share of its training: a third if that recomputes, or trains all."""
    return 1 / (2 + (fit.settings.gradient_checkpointing or question.train.method in WHOLE))


def passes_for(parameters: int, tokens_there: int) -> tuple[int, str]:
    """Epochs to reach the recommended tokens, at most four; and the reason."""
    target = wanted_tokens(parameters)
    needed = math.ceil(target / max(1, tokens_there))
    count = max(1, min(MOST_PASSES, needed))
    per = f"{TOKENS_PER_PARAMETER} tokens per parameter (Hoffmann et al. 2022)"
    text = f"{per} would be {count_text(target)}; your data has {count_text(tokens_there)}"
    if needed > count:
        text += f": {needed:,} passes; more than {MOST_PASSES} are worth much less (Muennighoff et al. 2023)"
    return count, text

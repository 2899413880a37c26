"""The recommendation fits, has a reason for everything, respects pins, and depends on nothing it should not."""

import dataclasses
import itertools
import math
from functools import partial
from typing import Any

import pytest

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.memory.estimate import with_margin
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.model.files import ModelFiles, TensorHeader, read_model_files
from safetrain.core.model.shapes import wanted_tokens
from safetrain.core.ranges import check_ranges
from safetrain.core.records.reports import DataReport, LengthQuantiles, Machine, SplitReport
from safetrain.core.records.schema import OFF, SET, WHOLE, Data, Evaluate, Gate, Lora, Model, Pipeline, Preflight, Train
from safetrain.core.records.settings import MEASURED, DryRun, Recommendation, require_plan_for, resolve, usual_warmup
from safetrain.plan.candidates import PlanInputs, PlannedTraining, ask, candidates_at, nothing_fits, places_of_base
from safetrain.plan.recommend import recommendation_of, within_minutes
from stages.recommend_config import cut_lines, recommendation_lines
from tests.conftest import EMBEDDED
from tests.stores import worst_update

GIB = 2**30
OPEN = Train(
    beta=0.1, from_adapter=None,
    batch_size=None, gradient_accumulation=None, max_seq_length=None, learning_rate=None, num_epochs=None,
    max_steps=None, minutes=None, max_examples=None, warmup_steps=None, save_steps=None, eval_steps=None,
    log_steps=None, max_grad_norm=1.0, dequantize_base=None, seed=1, method="lora", optimizer="adam",
    schedule="cosine", weight_decay=0.0, early_stopping_patience=None, max_loss_jump=None,
    gradient_checkpointing=None, stream_base=None, compute_dtype=None, keep_checkpoints=2, memory_limit_gb=None,
    hang_minutes=2.0, trace="none", ranks=1,
)  # fmt: skip
NO_ROWS = TokenRows.of([])
NO_LORA_PINS = Lora(rank=None, scale=None, dropout=None, num_layers=None, targets=None)


def data(rows: int = 1000, longest: int = 500) -> DataReport:
    lengths = LengthQuantiles(longest // 2, longest, longest, longest, longest, longest)
    split = SplitReport(rows, rows * 100, rows * 50, lengths)
    return DataReport("d", "chat", "as given", (), (), "", (), "", split, split, split)


def machine(gib: float = 16, backend: str = "cpu") -> Machine:
    return Machine("Linux", "x86_64", "3.11", "chip", 2, backend, "", "0.32.4", "0.32.2", 16 * GIB, int(gib * GIB))


def qwen_7b() -> ModelFiles:
    """The shape of a 7B model in 4 bits: headers are all that the plan reads."""
    embedded = read_model_files(EMBEDDED)
    return dataclasses.replace(
        embedded, hidden_size=3584, num_layers=28, num_heads=28, num_kv_heads=4, head_dim=128,
        intermediate_size=18944, vocab_size=152064, max_positions=32768, static_bytes=4_284_000_000,
    )  # fmt: skip


def question_of(
    data: DataReport, machine: Machine, model: ModelFiles, train: Train, lora: Lora, **rows: Any
) -> PlannedTraining:
    """Without ``rows`` all are as long as the longest, and every token is a label."""
    question = ask(PlanInputs(data, machine, model, TrainingRows(NO_ROWS, NO_ROWS)), train, lora)
    worst = {"largest": lambda length, rows: worst_update(min(length, data.longest_row), rows), **rows}
    return dataclasses.replace(question, **worst)


def recommend(*parts: Any, **rows: Any) -> Recommendation:
    """By the closed form alone."""
    question = question_of(*parts, **rows)
    places = [(stream, length) for stream in places_of_base(question) for length in question.lengths]
    candidates = [fit for stream, length in places for fit in candidates_at(question, length, stream=stream)]
    best = next((fit for fit in candidates if fit.fits), None)
    if best is None:
        raise nothing_fits(question, candidates)
    return recommendation_of(question, best)


def plan(train: Train = OPEN, lora: Lora = NO_LORA_PINS, **changes: object) -> Recommendation:
    parts: dict[str, object] = {"data": data(), "machine": machine(), "model": read_model_files(EMBEDDED), **changes}
    return recommend(parts["data"], parts["machine"], parts["model"], train, lora)


def test_every_value_has_its_reason() -> None:
    recommendation = plan()
    reasons = set(recommendation.reasons)
    values = {key for key in vars(recommendation.settings) if getattr(OPEN, key, 0) is None} - set(OFF)
    lora = {f"lora.{key}" for key in vars(recommendation.settings.lora)}
    assert reasons == values | lora | EVALUATED | MACHINES
    assert all(len(reason) > 5 for reason in recommendation.reasons.values())
    assert recommendation.verified is False


def test_less_memory_gives_a_smaller_micro_batch_and_the_same_update() -> None:
    sizes = []
    for gib in (96, 40, 24, 16):
        chosen = plan(model=qwen_7b(), machine=machine(gib, "metal"), data=data(longest=500))
        settings = chosen.settings
        sizes.append(settings.batch_size)
        assert settings.rows_per_update == 16
        assert with_margin(chosen.memory_terms) <= MemoryBudget(int(gib * GIB)).mlx_bytes
        assert settings.learning_rate * settings.lora.scale == pytest.approx(2e-4), "of the width, not of the memory"
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_what_cannot_fit_is_an_error_before_training() -> None:
    in_memory = dataclasses.replace(OPEN, stream_base=False)
    with pytest.raises(MachineError, match="do not fit this machine") as caught:
        plan(in_memory, model=qwen_7b(), machine=machine(4, "metal"))
    assert "GiB with margin, at batch size 1 and" in str(caught.value)
    assert caught.value.exit_code == 5
    long = dataclasses.replace(in_memory, max_seq_length=8192)
    with pytest.raises(MachineError, match=r"use train\.stream_base=true train\.max_seq_length=\d+ \("):
        plan(long, model=qwen_7b(), machine=machine(6.5, "metal"), data=data(longest=8000))


def test_the_base_stays_on_disk_only_where_nothing_else_fits() -> None:
    """Also a model four times the memory, on a Mac of 8 GB."""
    assert plan(model=qwen_7b(), machine=machine(16, "metal")).settings.stream_base is False
    small = plan(model=qwen_7b(), machine=machine(3, "metal"))
    settings = small.settings
    assert (settings.stream_base, settings.gradient_checkpointing, settings.dequantize_base) == (True, True, False)
    assert small.predicted_peak_bytes < 3 * GIB
    assert plan(dataclasses.replace(OPEN, stream_base=True)).settings.stream_base is True


def a_billion() -> ModelFiles:
    """In 4 bits."""
    matrices = []
    for number in range(10):
        matrices.append(TensorHeader(f"a{number}.weight", "U32", (1000, 12_500), 50_000_000, bits=4))
        matrices.append(TensorHeader(f"a{number}.scales", "F32", (1000, 1_562), 6_250_000, of_quantization=True))
    return dataclasses.replace(read_model_files(EMBEDDED), tensors=tuple(matrices), static_bytes=562_500_000)


def test_a_base_that_does_not_fit_dequantized_stays_quantized_on_cpu() -> None:
    assert a_billion().parameters == 10**9
    assert plan(model=a_billion(), machine=machine(8)).settings.dequantize_base is True
    assert plan(model=a_billion(), machine=machine(3)).settings.dequantize_base is False
    assert plan(machine=machine(16, "metal")).settings.dequantize_base is False


def test_a_cuda_device_dequantizes_where_that_was_measured_to_be_faster_and_the_weights_fit() -> None:
    found = []
    for gib, pays in ((8, False), (8, True), (1, True)):
        chosen = plan(model=a_billion(), machine=dataclasses.replace(machine(gib, "cuda"), dequantizing_pays=pays))
        found.append((chosen.settings.dequantize_base, chosen.reasons["dequantize_base"][:18]))
    assert found == [(False, "the GPU multiplies"), (True, "dequantized weight"), (False, "kept quantized to ")]
    tight = dataclasses.replace(machine(4.2, "cuda"), dequantizing_pays=True)
    assert plan(model=a_billion(), machine=tight, data=data(longest=100)).settings.dequantize_base is True
    model = a_billion()
    scales = tuple(dataclasses.replace(each, dtype=each.dtype.replace("F32", "BF16")) for each in model.tensors)
    types: dict[str, Any] = {"dequantizing_pays": True, "compute_dtype": None, "quantized_compute_dtype": "float32"}
    t4, emulated = dataclasses.replace(machine(8, "cuda"), **types), dataclasses.replace(model, tensors=scales)
    kept = plan(dataclasses.replace(OPEN, dequantize_base=False), model=emulated, machine=t4)
    assert plan(model=emulated, machine=t4).settings.compute_dtype is None, "each way has its own faster type"
    assert kept.settings.compute_dtype == "float32"


@pytest.mark.parametrize("backend", ["cpu", "metal", "cuda"])
def test_as_many_logits_at_once_as_are_fast_where_they_fit(backend: str) -> None:
    """Of a vocabulary of 152,064."""
    found = {}
    for gib, wanted in ((200, 128), (200, 512), (5.4, 512)):
        here = dataclasses.replace(machine(gib, backend), labels_at_once=wanted)
        chosen = plan(model=qwen_7b(), machine=here, data=data(longest=300))
        found[gib, wanted] = chosen.settings.labels_at_once
        assert with_margin(chosen.memory_terms) <= here.memory_budget.mlx_bytes
    assert found == {(200, 128): 128, (200, 512): 512, (5.4, 512): 32}


def test_blocks_are_recomputed_only_where_nothing_fits_otherwise() -> None:
    tight, roomy = (plan(model=qwen_7b(), machine=machine(gib, "metal"), data=data(longest=2000)) for gib in (10, 64))
    assert (tight.settings.gradient_checkpointing, roomy.settings.gradient_checkpointing) == (True, False)
    assert tight.reasons["gradient_checkpointing"].startswith("less memory")
    pinned = plan(dataclasses.replace(OPEN, gradient_checkpointing=True))
    assert pinned.settings.gradient_checkpointing
    assert pinned.predicted_peak_bytes < plan().predicted_peak_bytes


def test_full_fine_tuning_goes_slower_and_wants_a_float_base() -> None:
    floats = dataclasses.replace(read_model_files(EMBEDDED), quantization_bits=None)
    full, lora = (plan(dataclasses.replace(OPEN, method=method), model=floats) for method in ("full", "lora"))
    product = lora.settings.learning_rate * lora.settings.lora.scale
    assert full.settings.learning_rate == pytest.approx(product / 10, rel=0.05)
    trained = [each.memory_terms["trained weights"] for each in (full, lora)]
    assert trained[0] > trained[1]
    with pytest.raises(ConfigError, match="Quantized weights cannot be trained in full"):
        plan(dataclasses.replace(OPEN, method="full"))


def test_pins_are_respected_and_completed() -> None:
    pinned = dataclasses.replace(OPEN, batch_size=2, num_epochs=1, max_seq_length=64)
    chosen = plan(pinned, dataclasses.replace(NO_LORA_PINS, rank=3, targets=["q_proj"])).settings
    assert (chosen.batch_size, chosen.gradient_accumulation, chosen.num_epochs) == (2, 8, 1)
    assert (chosen.max_seq_length, chosen.lora.rank, chosen.lora.targets) == (64, 3, ("q_proj",))
    odd = plan(dataclasses.replace(OPEN, gradient_accumulation=5, batch_size=2)).settings
    assert (odd.batch_size, odd.gradient_accumulation) == (2, 5)
    kept = plan(dataclasses.replace(OPEN, gradient_accumulation=8)).settings  # the rows of an update
    assert (kept.batch_size, kept.gradient_accumulation) == (2, 8)
    one = plan(dataclasses.replace(OPEN, max_steps=1)).settings
    assert (one.warmup_steps, one.save_steps, one.eval_steps, one.log_steps) == (0, 1, 1, 1)


UNUSUAL: dict[str, tuple[Any, ...]] = {
    "batch_size": (7, 9, 96), "gradient_accumulation": (3, 5, 100), "max_seq_length": (40, 77), "num_epochs": (11,),
    "learning_rate": (0.0123,), "max_steps": (77,), "warmup_steps": (0, 3), "save_steps": (13, 10**6),
    "eval_steps": (17, 10**6), "log_steps": (19, 10**6), "dequantize_base": (False, True),
    "gradient_checkpointing": (False, True), "stream_base": (False, True), "compute_dtype": ("float32", "float16"),
    "lora.rank": (5,), "lora.scale": (3.3,), "lora.dropout": (0.0, 0.15), "lora.num_layers": (1,),
    "lora.targets": (["o_proj"],),
}  # fmt: skip
EVALUATED = {"test_tokens", "answer_tokens", "general_tokens", "valid_tokens"}  # no keys of params.yaml
MACHINES = set(MEASURED)  # nor these
OF_THE_RUN = ("learning_rate", "warmup_steps", "save_steps", "eval_steps", "log_steps")  # the plan is the same without


@pytest.mark.parametrize("method", ["lora", "full", "pretrain", "dpo", "orpo"])
@pytest.mark.parametrize("backend", ["cpu", "metal", "cuda"])
def test_a_pinned_value_is_planned_and_trained_or_refused_by_its_name(method: str, backend: str) -> None:
    assert set(UNUSUAL) == set(plan().reasons) - EVALUATED - MACHINES
    model, kept = FLOATS if method in WHOLE else read_model_files(EMBEDDED), 0
    for key, value in ((key, value) for key, values in UNUSUAL.items() for value in values):
        for also in [{}] if method in WHOLE else [{}, {"stream_base": True}]:
            pins = {key: value, **also}
            train = dataclasses.replace(OPEN, method=method, **{k: v for k, v in pins.items() if "." not in k})
            lora = dataclasses.replace(NO_LORA_PINS, **{k[5:]: v for k, v in pins.items() if "." in k})
            try:
                check_pins(train, lora)
                chosen = recommend(data(), machine(64, backend), model, train, lora, row_count=400)
            except ConfigError as refusal:
                refused = str(refusal)
                assert any(key in refused for key in pins)
                continue
            kept += 1
            require_kept(pins, chosen, train, lora)
    assert kept > 20


def require_kept(pins: dict[str, Any], chosen: Recommendation, train: Train, lora: Lora) -> None:
    """In the plan, in what it prints, and in what is trained."""
    planned = chosen.settings
    settings, rows = resolve(train, lora, planned), TokenRows.of([token_row([1] * 20, [True] * 20)] * 8)
    lines = (line.split(None, 2) for line in recommendation_lines(chosen, TrainingRows(rows, rows), train))
    printed = {name: (text, reason) for name, text, reason in lines}
    for key, value in pins.items():
        parts, name = ((settings.lora, planned.lora) if "." in key else (settings, planned)), key.removeprefix("lora.")
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(parts[0], name) == expected, pins
        assert getattr(parts[1], name) == expected or key in OF_THE_RUN, pins
        if key in chosen.reasons:  # full fine-tuning gives none for lora.num_layers
            assert printed[key][0] == (value[0] if isinstance(value, list) else str(value)), pins
            assert SET in printed[key][1], pins


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_every_batch_size_holds_whole_pairs_in_a_step(method: str) -> None:
    for size, accumulation in itertools.product(range(1, 65), (None, 1, 2, 3, 8)):
        train = dataclasses.replace(OPEN, method=method, batch_size=size, gradient_accumulation=accumulation)
        chosen = recommend(data(), machine(64), read_model_files(EMBEDDED), train, NO_LORA_PINS)
        if accumulation and size * accumulation % 2:
            for refused in (check_pins, partial(resolve, recommended=chosen.settings)):
                with pytest.raises(ConfigError, match="gradient_accumulation is odd"):
                    refused(train, NO_LORA_PINS)
            continue
        settings = resolve(train, NO_LORA_PINS, chosen.settings)
        assert settings.batch_size == chosen.settings.batch_size == size
        assert settings.gradient_accumulation == chosen.settings.gradient_accumulation
        assert accumulation in (None, settings.gradient_accumulation)
        assert settings.rows_per_update % 2 == 0
        assert settings.rows_per_update <= max(2 * size, 21) or accumulation
    other = plan(dataclasses.replace(OPEN, method=method)).settings
    with pytest.raises(ConfigError, match="is odd"):  # a plan for other pins
        resolve(dataclasses.replace(OPEN, method=method, batch_size=5, gradient_accumulation=1), NO_LORA_PINS, other)


def pipeline(train: Train, lora: Lora, model: str = "m") -> Pipeline:
    data = Data(path="d", columns=None, held_out_fraction=0.1, near_duplicate_similarity=0.8, downgrade=None)
    return Pipeline(
        model=Model(path=model, create=None, tokenizer=None), data=data, train=train, lora=lora,
        evaluate=Evaluate(max_examples=None, max_new_tokens=48, score=None, schema=None, checker=None),
        preflight=Preflight(level="quick", downgrade=None),
        gate=Gate(least_gain=0.0, least_score=None, most_forgotten=None),
    )  # fmt: skip


def check_pins(train: Train, lora: Lora) -> None:
    """Refuse what a stage refuses before it begins."""
    check_ranges(pipeline(train, lora))


def test_a_warm_up_ends_before_the_run_does() -> None:
    steps = plan().settings.num_epochs * -(-1000 // 16)
    longest = dataclasses.replace(OPEN, warmup_steps=steps - 1)
    assert resolve(longest, NO_LORA_PINS, plan(longest).settings).warmup_steps == steps - 1
    for pins in ({"warmup_steps": steps}, {"warmup_steps": 500, "max_steps": 21}, {"warmup_steps": 1, "max_steps": 1}):
        numbers = rf"warmup_steps is {pins['warmup_steps']}\.(.|\n)*less than the {pins.get('max_steps', steps)} step"
        with pytest.raises(ConfigError, match=numbers):
            plan(dataclasses.replace(OPEN, **pins))  # type: ignore[arg-type]
    assert plan(dataclasses.replace(OPEN, max_steps=1)).settings.warmup_steps == 0


def test_the_time_of_a_run_counts_the_validations_that_are_set() -> None:
    seconds, measured = [], DryRun(10**8, 10**8, 0.5, "cpu", None)
    for eval_steps in (None, 10**6, 1):
        train = dataclasses.replace(OPEN, eval_steps=eval_steps)
        question = question_of(data(), machine(), read_model_files(EMBEDDED), train, NO_LORA_PINS, valid_tokens=10_000)
        seconds.append(recommendation_of(question, candidates_at(question, 512)[0], measured).total_seconds or 0.0)
    assert seconds[1] < seconds[0] < seconds[2]


def test_how_much_is_evaluated_follows_from_the_training_and_from_no_clock() -> None:
    """Similar runs measure the same rows, and any run more than a step's."""

    def sizes(model: ModelFiles, epochs: int, seconds: float, rows: int) -> tuple[int, int, int]:
        many, train = data(rows), dataclasses.replace(OPEN, num_epochs=epochs)
        question = question_of(many, machine(), model, train, NO_LORA_PINS, row_count=1000)
        fit = candidates_at(question, 512)[0]
        plan = recommendation_of(question, fit, DryRun(10**8, 10**8, seconds, "cpu", None))
        assert plan.total_seconds is not None
        assert plan.total_seconds > 1000 / 16 * epochs * seconds
        return plan.test_tokens, plan.answer_tokens, plan.general_tokens

    small = read_model_files(EMBEDDED)
    large = dataclasses.replace(small, tensors=small.tensors * 100)
    for model in (small, large):
        assert sizes(model, 10, 0.01, 10**6) == sizes(model, 10, 60.0, 10**6)
        assert sizes(model, 100, 1.0, 10**6) == sizes(model, 101, 1.0, 10**6)
    assert all(more > less for more, less in zip(sizes(large, 999, 1.0, 9), sizes(large, 9, 1.0, 9), strict=True))
    assert 16 * 100 <= sizes(large, 1, 1.0, 10**6)[0] <= 32 * 100
    assert sizes(small, 1, 1.0, 220)[0] >= 220 * 100
    assert "65.5 % of 1,000 test rows" in plan().reasons["test_tokens"]


def test_pins_that_the_model_cannot_take_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"lora\.num_layers is 7"):
        plan(lora=dataclasses.replace(NO_LORA_PINS, num_layers=7))
    with pytest.raises(ConfigError, match=r"does not have: k_prj"):
        plan(lora=dataclasses.replace(NO_LORA_PINS, targets=["q_proj", "k_prj"]))
    with pytest.raises(ConfigError, match=r"train\.max_seq_length is 1024"):
        plan(dataclasses.replace(OPEN, max_seq_length=1024))


def test_a_plan_for_something_else_is_refused() -> None:
    lora = plan()
    require_plan_for(lora, "dora", lora.base)
    for method, model in (("full", lora.base), ("lora", "models/other")):
        with pytest.raises(ConfigError, match="is for another model or method"):
            require_plan_for(lora, method, model)


def test_one_long_row_does_not_set_the_length_when_it_does_not_fit() -> None:
    outlier = data(longest=500)
    lengths = dataclasses.replace(outlier.train.lengths, max=30_000)
    outlier = dataclasses.replace(outlier, train=dataclasses.replace(outlier.train, lengths=lengths))
    chosen = plan(data=outlier, model=qwen_7b(), machine=machine(24, "metal"))
    assert chosen.settings.max_seq_length == 512
    assert "longest row has 30,000 tokens and is truncated" in chosen.reasons["max_seq_length"]
    lengths_of_two = [plan(data=data(longest=tokens)).settings.max_seq_length for tokens in (33, 5000)]
    assert lengths_of_two == [64, 512], "of the model"


def test_what_a_person_set_is_printed_as_set_and_changes_no_plan() -> None:
    rows = TokenRows.of([token_row([1] * 20, [True] * 20)] * 8)
    free = dict.fromkeys(("warmup_steps", "save_steps", "log_steps"), 9)
    pinned = dataclasses.replace(OPEN, learning_rate=0.125, eval_steps=7, **free)  # type: ignore[arg-type]
    assert plan(pinned) == plan()
    settings = resolve(pinned, NO_LORA_PINS, plan().settings)
    assert (settings.learning_rate, settings.eval_steps, settings.batch_size) == (0.125, 7, plan().settings.batch_size)
    lines = [line.split() for line in recommendation_lines(plan(), TrainingRows(rows, rows), pinned)]
    assert ["learning_rate", "0.125", "set", "by", "you"] in lines
    assert ["eval_steps", "7", "set", "by", "you"] in lines


def test_pairs_that_are_equal_when_truncated_are_counted() -> None:
    prompt, ends = [7] * 10, ([1] * 6, [2] * 6, [1] * 6, [1] * 5 + [2])
    rows = TokenRows.of([token_row([*prompt, *end], [False] * 10 + [True] * 6) for end in ends])
    pairs = TokenRows(rows.ids, rows.trained, rows.starts, rows.lengths, rows.label_counts, rows_per_pair=2)
    lines = list(cut_lines(TrainingRows(pairs, NO_ROWS), 14))
    assert lines[0].startswith("train: 4 of 4 rows truncated to 14 tokens")
    assert lines[1].startswith("train: 1 of 2 pairs have equal answers when truncated")
    assert not list(cut_lines(TrainingRows(pairs, NO_ROWS), 16))


FLOATS = dataclasses.replace(read_model_files(EMBEDDED), quantization_bits=None)


def pretraining(there: int, **pins: object) -> Recommendation:
    """Of the embedded model on so many tokens, in windows of 512."""
    train = dataclasses.replace(OPEN, method="pretrain", **pins)  # type: ignore[arg-type]
    rows = {"largest": worst_update, "row_count": -(-there // 512), "usual_per_update": 4}
    return recommend(data(), machine(64), FLOATS, train, NO_LORA_PINS, **rows)


@pytest.mark.parametrize("times", [0.3, 0.7, 1.5, 60])
def test_a_run_sees_the_tokens_that_are_wanted_and_ends(times: float) -> None:
    wanted = wanted_tokens(FLOATS.parameters)
    chosen = pretraining(int(times * wanted))
    update = chosen.settings.rows_per_update * 512
    assert chosen.longest_row == 512, "of whole windows, whatever the documents"
    assert chosen.settings.num_epochs == max(1, math.ceil(1 / times))
    assert chosen.settings.max_steps == -(-wanted // update)
    assert chosen.settings.warmup_steps == usual_warmup(chosen.settings.max_steps)
    reason = chosen.reasons["max_steps"]
    assert "20 per parameter" in reason


def test_too_little_text_and_pins_set_no_other_end() -> None:
    wanted = wanted_tokens(FLOATS.parameters)
    assert (pretraining(wanted // 9).settings.max_steps, pretraining(wanted // 9).settings.num_epochs) == (None, 4)
    assert pretraining(9 * wanted, num_epochs=2).settings.max_steps is None
    assert pretraining(9 * wanted, max_steps=7).settings.max_steps == 7
    chosen = pretraining(wanted // 9, max_steps=10**6)  # in as many passes as it takes
    settings, epochs = chosen.settings, chosen.settings.num_epochs
    update = settings.rows_per_update * settings.max_seq_length
    assert (epochs - 1) * (wanted // 9) < 10**6 * update <= 1.01 * epochs * (wanted // 9)
    assert "adapter" not in "".join(chosen.reasons.values())
    with pytest.raises(ConfigError, match=r"train\.max_seq_length is 4096"):  # longer than the context
        pretraining(10**9, max_seq_length=4096)


def test_minutes_become_steps_with_a_schedule_for_them() -> None:
    measured = DryRun(10**8, 10**8, 0.5, "cpu", None)

    def planned(minutes: float) -> Recommendation:
        train = dataclasses.replace(OPEN, minutes=minutes)
        question = question_of(data(), machine(), read_model_files(EMBEDDED), train, NO_LORA_PINS)
        return within_minutes(question, candidates_at(question, 512)[0], measured)

    whole, half, less = (planned(minutes) for minutes in (1000, 2, 1.5))
    assert whole.settings.max_steps is None
    for chosen, minutes in ((half, 2), (less, 1.5)):
        assert 0.97 * 60 * minutes < (chosen.total_seconds or 0.0) <= 60 * minutes
        assert f"train.minutes = {minutes:g}" in chosen.reasons["max_steps"]
        assert chosen.settings.warmup_steps == usual_warmup(chosen.settings.max_steps or 0)
    assert (less.settings.max_steps or 0) < (half.settings.max_steps or 0)
    with pytest.raises(ConfigError, match=r"train\.minutes is too short"):
        planned(0.01)

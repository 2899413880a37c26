"""A whole run: it learns, it resumes bit for bit, it refuses what it should, and it leaves what it promises."""

import csv
import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import row_order
from safetrain.core.errors import BadUpdateError, InterruptedRun, ModelError, TrainingError
from safetrain.core.formatting import describe_proof
from safetrain.core.recorder import Edge, Phase, Recorder, read_flight
from safetrain.core.records.adapter_files import PromptFormat, read_prompt_format
from safetrain.core.records.evaluation import Likeness
from safetrain.core.records.metrics import LEAST_PROVED, Proof, StepRecord, append_csv, csv_of, parse_csv
from safetrain.core.records.run_state import RunIdentity
from safetrain.core.records.settings import LoraSettings, TrainSettings, identity_of
from safetrain.core.storage.files import write_text
from safetrain.engine.backend import device
from safetrain.engine.cpu.blas import cores, use_threads
from safetrain.engine.job import Job
from safetrain.engine.model import open_base
from safetrain.engine.run import Watcher
from safetrain.engine.selftest import dry_run
from safetrain.engine.training import Result, train
from safetrain.engine.tuned import prove, require_proof
from safetrain.engine.weight_files import apply_adapter, load_arrays, save_arrays
from tests.conftest import cpu_only
from tests.engine.exact import SETTINGS, rows_of, within
from tests.support.jobs import job_of, with_rows

Build = Callable[..., Path]


def rows(count: int, seed: int) -> TokenRows:
    return rows_of(*np.random.default_rng(seed).integers(6, 40, count).tolist(), seed=seed)


def job_in(folder: Path, base: Path, settings: TrainSettings = SETTINGS) -> Job:
    identity = RunIdentity("base", "train", "valid", json.dumps(dataclasses.asdict(settings), sort_keys=True))
    return job_of(folder, base, rows(18, 1), rows(5, 2), settings, identity)


def run(
    job: Job, stop_at: int | None = None, say: Callable[[str], None] = print, stop: Callable[[], int] | None = None
) -> Result:
    """Train with a metrics file; ``stop_at`` plays a Ctrl-C after that many updates."""
    log = job.output / "metrics.csv"
    steps: list[StepRecord] = []

    def record(records: list[StepRecord]) -> None:
        steps.append(records[-1])
        append_csv(log, records[-1])

    def stopped() -> int:
        return 2 if steps and steps[-1].step == stop_at else 0

    recorder = Recorder(job.output / "recorder.bin")
    result = train(job, Watcher(lambda old, *_: write_text(log, csv_of(old)), record, stop or stopped, recorder, say))
    assert result is not None
    return result


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in load_arrays(file).items()}


def weights(folder: Path) -> dict[str, np.ndarray]:
    return read_arrays(folder / "adapters" / "adapters.safetensors")


def same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    assert one.keys() == two.keys()
    assert one
    return all((one[name] == two[name]).all() for name in one)


def final_state(folder: Path) -> dict[str, np.ndarray]:
    pointer = json.loads((folder / "training_state.json").read_text())
    parts = {
        part: read_arrays(folder / pointer["checkpoint"] / f"{part}.safetensors")
        for part in ("adapters", "optimizer", "best")
    }
    return {f"{part}:{name}": value for part, arrays in parts.items() for name, value in arrays.items()}


def require_same_run(found: Path, expected: Path) -> None:
    """Adapter, optimizer, best adapter and metrics to the last bit."""
    assert same(final_state(found), final_state(expected))
    assert same(weights(found), weights(expected))
    assert metrics_without_time(found) == metrics_without_time(expected)


TIMED = ("labels_per_second", "peak_memory_bytes", "footprint_bytes", "elapsed_seconds")


def metrics_without_time(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return [{key: value for key, value in row.items() if key not in TIMED} for row in csv.DictReader(file)]


def test_the_loss_falls_and_the_last_partial_window_counts(tiny_model: Build, tmp_path: Path) -> None:
    result = run(job_in(tmp_path / "a", tiny_model(bits=4)))
    records = parse_csv((tmp_path / "a" / "metrics.csv").read_text())
    assert result.metrics.steps == 15  # 18 rows, 4 per update: 5 updates an epoch, the last of 2 rows
    assert records[-1].epoch == 3
    assert result.state.records[0].valid_loss == records[0].valid_loss
    assert result.state.labels == 3 * sum(row.labels for row in rows(18, 1))
    assert records[-1].train_loss is not None
    assert records[1].train_loss is not None
    assert records[-1].train_loss < records[1].train_loss - 0.5


@pytest.mark.parametrize("stop_at", [1, 7, 14])
def test_an_interrupted_run_continues_bit_for_bit(tiny_model: Build, tmp_path: Path, stop_at: int) -> None:
    """With dropout and accumulation; adapter, optimizer, best adapter and metrics are those of the unbroken run."""
    base = tiny_model(bits=4)
    run(job_in(tmp_path / "whole", base))
    broken = tmp_path / "broken"
    (broken / ".checkpoint-killed").mkdir(parents=True)
    with pytest.raises(InterruptedRun, match=f"Stopped at step {stop_at} of 15") as caught:
        run(job_in(broken, base), stop_at)
    assert caught.value.exit_code == 130
    for stale in (broken / "adapters").glob("*"):
        stale.unlink()  # as DVC does before it runs a stage again
    mx.random.seed(999)  # a new process would not have the old random state either
    result = run(job_in(broken, base))
    assert result.state.resumed_from_step == stop_at
    require_same_run(broken, tmp_path / "whole")
    folders = sorted(path.name for path in broken.iterdir() if path.is_dir())
    assert folders == ["adapters", "checkpoint_epoch_2_step_14", "checkpoint_epoch_3_step_15"], "the others are pruned"
    again = run(job_in(broken, base))  # as where the process dies before its result is written down
    assert (again.state.resumed_from_step, again.metrics) == (15, result.metrics)
    assert again.state.labels == result.state.labels


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = cores()
    use_threads(2)
    yield
    use_threads(before)


@cpu_only
@pytest.mark.usefixtures("two_threads")
def test_a_resumed_run_keeps_its_threads(tiny_model: Build, tmp_path: Path) -> None:
    """They decide how rows are divided, which random numbers dropout draws, and how sums are rounded."""
    base = tiny_model(bits=4)
    run(job_in(tmp_path / "whole", base))
    with pytest.raises(InterruptedRun):
        run(job_in(tmp_path / "broken", base), 7)
    use_threads(1)
    assert run(job_in(tmp_path / "broken", base)).state.threads == 2
    require_same_run(tmp_path / "broken", tmp_path / "whole")


@cpu_only
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("clearly_faster", "threads"), [(0.0, 2), (100.0, 1)])
def test_a_dry_run_finds_the_threads(
    tiny_model: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clearly_faster: float, threads: int
) -> None:
    monkeypatch.setattr("safetrain.engine.selftest.CLEARLY_FASTER", clearly_faster)
    monkeypatch.setattr("safetrain.engine.selftest.DRY_RUN_TIMED_SECONDS", 1e3)  # however busy the machine is
    assert dry_run(job_in(tmp_path, tiny_model(bits=4)), tmp_path).threads == threads


def test_what_was_taught_of_answers_goes_with_the_adapter(tiny_model: Build, tmp_path: Path) -> None:
    prompt_format = PromptFormat((2, 7), "<think>\n\n</think>\n\n")
    run(with_rows(job_in(tmp_path / "a", tiny_model()), prompt_format=prompt_format))
    adapters = tmp_path / "a" / "adapters"
    assert read_prompt_format(adapters) == prompt_format
    (adapters / "chat.json").unlink()
    assert read_prompt_format(adapters) is None


def test_only_the_named_targets_of_the_top_layers_are_adapted(tiny_model: Build, tmp_path: Path) -> None:
    """An adapter of another shape is refused."""
    base, adapters = tiny_model(bits=4), tmp_path / "a" / "adapters"
    lora = LoraSettings(4, 2.0, 0.0, 1, ("q_proj", "mlp.down_proj"))
    run(job_in(tmp_path / "a", base, dataclasses.replace(SETTINGS, max_steps=2, lora=lora)))
    stems = {name.rpartition(".")[0] for name in weights(tmp_path / "a")}
    assert stems == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"}
    config = json.loads((adapters / "adapter_config.json").read_text())
    config["lora_parameters"]["rank"] = 8
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    for folder, message in ((adapters, "does not fit"), (tmp_path / "nowhere", "no adapter")):
        with pytest.raises(ModelError, match=message):
            apply_adapter(open_base(base, dequantize=False), folder)


PARTS = [(phase, edge) for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD) for edge in (Edge.BEFORE, Edge.AFTER)]


@pytest.mark.skipif(not device().on_cpu, reason="on a GPU an untraced run is compiled, which rounds otherwise")
@pytest.mark.parametrize("least_memory", [False, True])
def test_a_traced_run_gives_the_same_bits(tiny_model: Callable[..., Path], tmp_path: Path, least_memory: bool) -> None:
    """Rows are so long that an update of 2 x 2 has two micro-batches."""
    settings = dataclasses.replace(
        SETTINGS, max_steps=4, gradient_checkpointing=least_memory, dequantize_base=not least_memory
    )
    base, said, silent = tiny_model(bits=4), list[str](), list[str]()
    plain, traced = (
        with_rows(job_in(tmp_path / name, base, settings), train=rows_of(*range(36, 60, 2)))
        for name in ("plain", "traced")
    )
    run(plain, say=silent.append)
    run(dataclasses.replace(traced, trace=True), say=said.append)
    require_same_run(traced.output, plain.output)
    assert (bool(said), silent) == (True, [])
    found = read_flight(plain.output / "recorder.bin").records
    assert Phase.GRADIENT in {record.phase for record in found}
    phases = {phase for phase, _ in PARTS}
    assert not phases & {record.phase for record in found}
    parts = [record for record in read_flight(traced.output / "recorder.bin").records if record.phase in phases]
    groups = [parts[start : start + len(PARTS)] for start in range(0, len(parts), len(PARTS))]
    assert all([(record.phase, record.edge) for record in group] == PARTS for group in groups)
    assert all(len({record.work for record in group}) == 1 for group in groups)
    places = [(group[0].work.step, group[0].work.micro_batch) for group in groups]
    assert list(dict.fromkeys(places)) == [(step, micro_batch) for step in (1, 2, 3, 4) for micro_batch in (0, 1)]
    assert all(record.work.rows and record.work.tokens and record.active_bytes for record in parts)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_optimizer_continues_bit_for_bit(tiny_model: Build, tmp_path: Path, optimizer: str) -> None:
    """With DoRA, dropout, weight decay and recomputed blocks."""
    settings = dataclasses.replace(
        SETTINGS, method="dora", optimizer=optimizer, schedule="wsd", weight_decay=0.1,
        gradient_checkpointing=True, max_steps=4,
    )  # fmt: skip
    base = tiny_model(bits=3)
    run(job_in(tmp_path / "whole", base, settings))
    with pytest.raises(InterruptedRun):
        run(job_in(tmp_path / "broken", base, settings), 2)
    assert run(job_in(tmp_path / "broken", base, settings)).state.resumed_from_step == 2
    require_same_run(tmp_path / "broken", tmp_path / "whole")


def test_a_bad_update_is_written_down_and_the_same_command_stops_there_again(tiny_model: Build, tmp_path: Path) -> None:
    """One row begins with a token whose embedding is infinite."""
    base = tiny_model(tie=False)
    tensors = load_arrays(base / "model.safetensors")
    tensors["model.embed_tokens.weight"][4] = float("inf")
    save_arrays(base / "model.safetensors", tensors)
    job = job_in(tmp_path / "a", base)
    train = list(job.rows.train.documents)
    train[13] = token_row([4, *train[13].ids[1:].tolist()], train[13].trained.tolist())
    job = with_rows(job, train=TokenRows.of(train))
    for _ in range(2):
        with pytest.raises(BadUpdateError, match=r"Update \d+ was not applied: the loss is not a number") as caught:
            run(job)
    assert "lower train.learning_rate" in str(caught.value)
    assert "max_loss_jump" not in str(caught.value)
    (dump,) = (tmp_path / "a" / "bad_updates").glob("step_*.json")
    written = json.loads(dump.read_text())
    assert [row["row"] for row in written["rows"] if row["loss"] is None] == [14]
    assert len(written["rows"]) == 4
    assert json.loads((tmp_path / "a" / "training_state.json").read_text())["step"] == written["step"] - 1


def test_a_run_that_a_jump_has_stopped_goes_on_where_the_jump_is_allowed(tiny_model: Build, tmp_path: Path) -> None:
    """One row of noise among rows that say one word; the run ends as one that nothing has stopped."""
    settings = dataclasses.replace(SETTINGS, batch_size=1, gradient_accumulation=1, num_epochs=1, learning_rate=0.05)
    plain, noise = [token_row([7] * 20, [True] * 20)] * 18, rows(1, 3).cut(16)[0]
    place = int(row_order(settings.seed, 0, 18, 0)[12])
    train = TokenRows.of([*plain[:place], noise, *plain[place + 1 :]])
    base = tiny_model()

    def run_in(name: str, max_loss_jump: float | None) -> Result:
        job = job_in(tmp_path / name, base, dataclasses.replace(settings, max_loss_jump=max_loss_jump))
        identity = RunIdentity("base", "train", "valid", identity_of(job.settings))
        return run(dataclasses.replace(with_rows(job, train=train), identity=identity))

    run_in("whole", None)
    with pytest.raises(BadUpdateError, match="the loss jumped") as caught:
        run_in("broken", 0.5)
    assert "set a larger train.max_loss_jump, or null" in str(caught.value)
    assert run_in("broken", None).state.resumed_from_step == 12
    assert same(final_state(tmp_path / "broken"), final_state(tmp_path / "whole"))


def watcher(job: Job, stop: int = 0) -> Watcher:
    return Watcher(lambda *_: None, lambda _: None, lambda: stop, Recorder(job.output / "recorder.bin"))


def proof_of(job: Job, result: Result) -> Proof:
    return prove(job, result.tuned, watcher(job), result.metrics.steps)


@pytest.mark.parametrize(("method", "bits"), [("lora", 5), ("dora", 3), ("dora", None), ("full", None)])
def test_what_mlx_lm_opens_is_the_tuned_model_at_its_best_step(
    tiny_model: Build, tmp_path: Path, method: str, bits: int | None
) -> None:
    """Patience ends a run three steps after its best one: memory has gone on from it."""
    wild = dataclasses.replace(
        SETTINGS, method=method, learning_rate=0.05, eval_steps=1, num_epochs=9, early_stopping_patience=3
    )
    if bits == 3:
        wild = dataclasses.replace(wild, dequantize_base=False)
    job = job_in(tmp_path / "a", tiny_model(bits=bits), wild)
    result = run(job)
    assert 3 < result.metrics.best_step + 3 == result.metrics.steps < 45
    assert method != "full" or len(weights(tmp_path / "a")) == 2 * 9, "of each block seven matrices and two norms"
    mx.reset_peak_memory()
    found = proof_of(job, result)
    assert mx.get_peak_memory() <= 1.05 * result.state.peak_memory_bytes, "it needs no more than an update of one row"
    assert (found.rows, found.opened.same_answers) == (5, 1.0)
    assert found.tuned_loss == pytest.approx(result.metrics.best_valid_loss, rel=within(1e-5))
    assert found.base.loss == pytest.approx(result.state.records[0].valid_loss, rel=within(1e-5))
    assert found.opened.divergence < within(1e-6) < found.base.divergence
    assert "answers the same on 5 of 5 rows" in describe_proof(found)
    assert found.opened_by == ("safetrain" if bits == 3 else "mlx-lm")


def test_a_run_that_was_killed_at_it_comes_to_the_same(tiny_model: Build, tmp_path: Path) -> None:
    job = job_in(tmp_path / "a", tiny_model(bits=4), dataclasses.replace(SETTINGS, max_steps=4))
    result = run(job)
    with pytest.raises(InterruptedRun, match="after step 4, the last one") as caught:
        prove(job, result.tuned, watcher(job, stop=15), 4)
    assert caught.value.exit_code == 143
    assert proof_of(job, result) == proof_of(job, run(job))
    many = with_rows(job, valid=rows(300, 4))
    found = run(dataclasses.replace(many, output=tmp_path / "b", adapters=tmp_path / "b" / "adapters")).tuned
    assert LEAST_PROVED / 2 < found.rows.lengths.sum() < 1.2 * LEAST_PROVED < many.rows.valid.lengths.sum(), (
        "few are compared"
    )


def test_a_folder_that_is_another_model_is_an_error(tiny_model: Build, tmp_path: Path) -> None:
    job = job_in(tmp_path / "a", tiny_model(), dataclasses.replace(SETTINGS, max_steps=4))
    result, file = run(job), job.adapters / "adapters.safetensors"
    config = job.adapters / "adapter_config.json"
    written, shape = load_arrays(file), json.loads(config.read_text())
    mx.eval(written)
    half = {**shape["lora_parameters"], "scale": shape["lora_parameters"]["scale"] / 2}
    zeros = {name: mx.zeros_like(value) for name, value in written.items()}
    for arrays, says, error, match in (
        (zeros, shape, TrainingError, "is not the trained model"),
        (written, {**shape, "lora_parameters": half}, TrainingError, "is not the trained model"),
        (written, {**shape, "num_layers": 1}, ModelError, "cannot open the adapter"),
    ):
        save_arrays(file, arrays)
        config.write_text(json.dumps(says))
        with pytest.raises(error, match=match):
            proof_of(job, result)


@pytest.mark.parametrize(("base", "opened", "in_16_bit", "told"), [
    ((2.0 + 1e-8, 1e-9), (2.0, 0.0), False, "changes nothing"),
    ((2.0001, 3e-7), (2.0, 0.0), False, ""),  # one update: the divergence goes by squares
    ((2.5, 0.3), (2.004, 4e-3), True, ""),  # rounding in 16 bits
    ((2.5, 0.3), (2.5, 0.3), True, "is not the trained model"),
    ((2.5, 0.3), (float("nan"), float("nan")), True, "is not the trained model"),
])  # fmt: skip
def test_rounding_is_no_other_model_and_a_lost_adapter_is(
    base: tuple[float, float], opened: tuple[float, float], in_16_bit: bool, told: str
) -> None:
    """Losses and divergences; the tuned model's loss is 2."""
    found = Proof(3, 9, 2.0, Likeness(*base, 1.0, 3, 0, 0), Likeness(*opened, 1.0, 3, 0, 0), "mlx-lm")
    with pytest.raises(TrainingError, match=told) if told else nullcontext():
        require_proof(found, "adapters", in_16_bit=in_16_bit)

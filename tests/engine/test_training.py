"""A whole run: it learns, it resumes bit for bit, it refuses what it should, and it leaves what it promises."""

import csv
import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.errors import ConfigError, InterruptedRun, ModelError, TrainingError
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.recorder import Edge, Phase, Recorder, read_flight
from safetrain.core.records.adapter_files import PromptFormat, read_prompt_format
from safetrain.core.records.metrics import StepRecord, append_csv, read_csv, start_csv
from safetrain.core.records.run_state import RunIdentity
from safetrain.core.records.settings import LoraSettings, TrainJob, TrainSettings
from safetrain.engine.adapters import make_trainable
from safetrain.engine.backend import device
from safetrain.engine.job import LEAST_VALID_TOKENS, Job, load_job
from safetrain.engine.model import open_base
from safetrain.engine.run import Watcher
from safetrain.engine.training import Result, train
from safetrain.engine.weight_files import apply_adapter, load_arrays, save_arrays
from tests.engine.exact import SETTINGS, rows_of
from tests.stores import write_stores
from tests.support.jobs import job_of, with_rows
from tests.support.random_models import EMBEDDED

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
    result = train(job, Watcher(lambda old, *_: start_csv(log, old), record, stop or stopped, recorder, say))
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
    records = read_csv(tmp_path / "a" / "metrics.csv")
    assert result.metrics.steps == 15  # 18 rows, 4 per update: 5 updates an epoch, the last of 2 rows
    assert records[-1].epoch == 3
    assert result.state.records[0].valid_loss == records[0].valid_loss
    assert result.state.trained_tokens == 3 * sum(row.trained_tokens for row in rows(18, 1))
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
    assert again.state.trained_tokens == result.state.trained_tokens


def test_the_best_adapter_is_kept_not_the_last(tiny_model: Build, tmp_path: Path) -> None:
    """Far too high a learning rate makes validation worse with time."""
    wild = dataclasses.replace(SETTINGS, learning_rate=0.05, eval_steps=1)
    base = tiny_model()
    metrics = run(job_in(tmp_path / "a", base, wild)).metrics
    assert metrics.best_valid_loss < metrics.valid_loss
    validated = {r.step: r.valid_loss for r in read_csv(tmp_path / "a" / "metrics.csv") if r.step}
    assert metrics.best_valid_loss == min(loss for loss in validated.values() if loss is not None)
    state = final_state(tmp_path / "a")
    best = {name.removeprefix("best:"): value for name, value in state.items() if name.startswith("best:")}
    assert same(weights(tmp_path / "a"), best)


def test_an_adapter_that_changes_nothing_is_an_error(tiny_model: Build, tmp_path: Path) -> None:
    """Its updates are smaller than the rounding of what they are added to."""
    still = dataclasses.replace(SETTINGS, learning_rate=1e-30, max_steps=2)
    with pytest.raises(TrainingError, match="The adapter changes nothing"):
        run(job_in(tmp_path / "a", tiny_model(), still))


def test_what_was_taught_of_answers_goes_with_the_adapter(tiny_model: Build, tmp_path: Path) -> None:
    prompt_format = PromptFormat((2, 7), "<think>\n\n</think>\n\n")
    run(with_rows(job_in(tmp_path / "a", tiny_model()), prompt_format=prompt_format))
    adapters = tmp_path / "a" / "adapters"
    assert read_prompt_format(adapters) == prompt_format
    assert json.loads((adapters / "chat.json").read_text())["stop_ids"] == [2, 7]
    (adapters / "chat.json").write_text("{}")
    with pytest.raises(ModelError, match="prompt format cannot be read"):
        read_prompt_format(adapters)
    (adapters / "chat.json").unlink()
    assert read_prompt_format(adapters) is None


def test_targets_that_the_model_does_not_have_are_named(tiny_model: Build) -> None:
    model = open_base(tiny_model(), dequantize=False)
    with pytest.raises(ConfigError, match="nonsense") as caught:
        make_trainable(model, "lora", LoraSettings(4, 2.0, 0.0, 2, ("q_proj", "nonsense")), 1)
    assert "self_attn.q_proj" in str(caught.value)


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


def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    full = tmp_path / "full.safetensors"
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_arrays(full, {"a": mx.zeros((100_000,))})
    assert caught.value.errno == errno.ENOSPC


PARTS = [(phase, edge) for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD) for edge in (Edge.BEFORE, Edge.AFTER)]


@pytest.mark.skipif(not device().on_cpu, reason="on a GPU an untraced run is compiled, which rounds otherwise")
@pytest.mark.parametrize("least_memory", [False, True])
def test_a_traced_run_gives_the_same_bits_and_records_each_part(
    tiny_model: Callable[..., Path], tmp_path: Path, least_memory: bool
) -> None:
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


def test_a_run_that_max_steps_ends_early_validates_on_fewer_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [token_row(range(5, 55), [True] * 50)] * 600
    write_stores(tmp_path / "data" / "validated", EMBEDDED, rows, rows)
    monkeypatch.chdir(tmp_path)
    asked = TrainJob(str(EMBEDDED), SETTINGS, False, MemoryBudget(2**40), None)
    short = dataclasses.replace(asked, settings=dataclasses.replace(SETTINGS, max_steps=1))
    whole, few = (
        load_job(dataclasses.replace(asked, settings=dataclasses.replace(SETTINGS, max_steps=None))),
        load_job(short),
    )
    assert len(whole.valid) == 600
    assert 0.9 * LEAST_VALID_TOKENS < few.valid.tokens <= LEAST_VALID_TOKENS
    assert few.rows.valid_rows_available == 600

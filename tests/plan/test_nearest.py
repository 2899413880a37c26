"""Where nothing fits, something that would is named with what it needs; and nothing is trained unless asked for."""

import dataclasses
import json
from pathlib import Path

import pytest

from safetrain.core.errors import MachineError
from safetrain.core.model.files import ModelFiles, read_model_plan
from safetrain.core.records.settings import LoraSettings
from safetrain.plan.estimate import Estimate, what_would_fit
from tests.core.test_model_shapes import BIG
from tests.plan.test_recommend import OPEN, data, machine, plan, qwen_7b


def model_of(folder: Path, bits: int | None) -> ModelFiles:
    folder.mkdir(parents=True, exist_ok=True)
    quantization = {"quantization": {"group_size": 64, "bits": bits}} if bits else {}
    (folder / "config.json").write_text(json.dumps({**BIG["Qwen2.5-7B"][0], **quantization}))
    return read_model_plan(folder)


def shortage(model: ModelFiles, gib: float, length: int = 1024) -> Estimate:
    lora = LoraSettings(16, 2.0, 0.0, model.num_layers, ("all-linear",))
    return Estimate(model, machine(gib, "metal"), lora, checkpointing=True, tokens=length)


def test_shorter_rows_and_fewer_blocks_with_their_numbers(tmp_path: Path) -> None:
    asked = shortage(model_of(tmp_path / "m", 4), 7.0, 4096)
    assert not asked.fits
    found = what_would_fit(asked)
    assert any(text.startswith("train.max_seq_length=") for text in found)
    assert all(text.endswith("GiB)") for text in found)
    length = int(found[0].split("=")[1].split(" ")[0])
    assert asked.but(tokens=length).fits
    assert not asked.but(tokens=length + 32).fits
    pinned = what_would_fit(asked.but(rows=4, tokens=length))
    assert len(pinned) == 1
    assert pinned[0].startswith("train.batch_size=")


def test_fewer_bits_where_the_weights_are_the_trouble(tmp_path: Path) -> None:
    found = what_would_fit(shortage(model_of(tmp_path / "m", None), 9.0))
    assert any(text.startswith("safetrain convert") and "--bits 4" in text for text in found)


def test_the_size_of_a_smaller_base_where_nothing_else_fits(tmp_path: Path) -> None:
    (found,) = what_would_fit(shortage(model_of(tmp_path / "big", 2), 1.0, 256))
    assert found.startswith("a base of about ")


def test_the_error_of_the_plan_names_them() -> None:
    small = machine(6.5, "metal")
    long = dataclasses.replace(OPEN, max_seq_length=8192)
    with pytest.raises(MachineError, match=r"use train\.max_seq_length=\d+ \("):
        plan(long, model=qwen_7b(), machine=small, data=data(longest=8000))

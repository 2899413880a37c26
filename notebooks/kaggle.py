# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # safetrain on Kaggle
#
# In the notebook's settings: accelerator **GPU T4** (one is used), internet **on** in every session, persistence
# **Files only** if you want `/kaggle/working` back without saving a version.
#
# Not yet run by us on a T4. Away from Kaggle the same cells rehearse on the CPU, with the model and the rows that ship:
# that is what the outputs below are from.

# %%
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BEGAN = time.time()
ON_KAGGLE = "KAGGLE_KERNEL_RUN_TYPE" in os.environ  # set in Kaggle's kernels alone; a Kaggle login elsewhere is none
REPOSITORY = ""  # where your copy of safetrain is
WORKING = Path("/kaggle/working") if ON_KAGGLE else Path(tempfile.mkdtemp())
INPUT = Path("/kaggle/input")  # read only
print("on Kaggle" if ON_KAGGLE else "rehearsal on CPU")

# %% [markdown]
# ## Install
#
# Into `/kaggle/working`: of all of Kaggle's folders that one is kept.

# %%
if ON_KAGGLE:
    PROJECT = WORKING / "safetrain"
    if not PROJECT.is_dir():
        subprocess.run(["git", "clone", "--depth", "1", REPOSITORY, str(PROJECT)], check=True)
    wheels = [sys.executable, "-m", "pip", "install", "-q", "-e", ".[cuda12]", "-c", "constraints.txt"]
    subprocess.run(wheels, cwd=PROJECT, check=True)
    sys.path.insert(0, str(PROJECT))
else:
    PROJECT = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "params.yaml").is_file())
os.chdir(PROJECT)

# %% [markdown]
# ## Does this machine compute correctly?
#
# One forward and backward pass of a model, on the backend that was found, against mlx-lm's own layers.


# %%
def safetrain(*words, until=None):
    """Run a command and show what it prints; ask it to save and to end when ``until()`` is true."""
    command = [sys.executable, "-m", "safetrain.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            print(line, end="")
            if until is not None and until():
                process.terminate()
                until = None


safetrain("selftest")

# %% [markdown]
# ## Data and model
#
# Your rows: *Add input*, then their path under `/kaggle/input`. A model: from the hub, while internet is on, or one of
# Kaggle's as an input.

# %%
ROWS, MODEL = INPUT / "my-rows" / "train.jsonl", "mlx-community/Qwen2.5-0.5B-Instruct-4bit"
if ON_KAGGLE:
    safetrain("fetch", MODEL)
    OVERRIDES = [f"model.path=models/{MODEL.partition('/')[2]}"] + ([f"data.path={ROWS}"] if ROWS.exists() else [])
else:
    usual = "train.max_steps=150 train.save_steps=10 train.log_steps=5 evaluate.max_examples=8"
    OVERRIDES = os.environ.get("SAFETRAIN_NOTEBOOK", usual).split()

# %% [markdown]
# ## Train, and stop before Kaggle does
#
# Kaggle ends a session after 12 hours (in October 2026; see its own pages), and an idle one much earlier: let a long
# training run by *Save version → Save & run all*. Half an hour before, the training is asked to save and to end. In the
# rehearsal that is as soon as there is a checkpoint.

# %%
HOURS = 11.5


def time_is_up() -> bool:
    if ON_KAGGLE:
        return time.time() - BEGAN > 3600 * HOURS
    return any(Path("checkpoints_qlora").glob("checkpoint_*"))


if not ON_KAGGLE:
    safetrain("discard")
safetrain("run", *OVERRIDES, until=time_is_up)

# %% [markdown]
# What was chosen for this machine. A T4 only emulates bfloat16, and says that it has it: the type is decided by what
# was faster when both were tried; `null` means as the model is stored.

# %%
import json

machine = json.loads(Path("checkpoints_qlora/machine.json").read_text())
plan = json.loads(Path("checkpoints_qlora/recommended_config.json").read_text())
for name in ("backend", "device", "chip", "compute_dtype", "quantized_compute_dtype"):
    print(f"{name:<24}{json.dumps(machine[name])}")
for name in ("compute_dtype", "batch_size"):
    print(f"{name:<24}{plan['reasons'][name]}")

# %% [markdown]
# ## What survives the end of the kernel
#
# | | |
# |---|---|
# | `/kaggle/working`, version saved | kept as the version's output, up to 20 GB |
# | `/kaggle/working`, session ended | kept with persistence *Files only*, else gone |
# | everything else: `/tmp`, installed packages, `~/.cache` | gone |
#
# So the project lies in `/kaggle/working`, with the checkpoints in it. What a training run needs to go on is the folder
# `checkpoints_qlora`. In the rehearsal it is moved away here, as if the session had ended.

# %%
saved = WORKING / "last_version"
if not ON_KAGGLE:
    shutil.copytree("checkpoints_qlora", saved)
    safetrain("discard")
kept = sorted(Path(saved if saved.is_dir() else "checkpoints_qlora").glob("checkpoint_*"))
print(f"{len(kept)} checkpoints are kept: {', '.join(folder.name for folder in kept)}")

# %% [markdown]
# ## Go on in the next session
#
# *Add input → Notebook output*, the version that was saved; then run all cells. The same command continues at the step
# where it stopped.

# %%
before = INPUT / "my-notebook" / "safetrain" / "checkpoints_qlora" if ON_KAGGLE else saved
if before.is_dir():
    shutil.copytree(before, "checkpoints_qlora", dirs_exist_ok=True)
safetrain("run", *OVERRIDES)

# %% [markdown]
# ## The result
#
# The adapter is in `checkpoints_qlora/adapters`; `safetrain fuse` makes one model of it and its base.

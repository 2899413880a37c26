"""The fifteen faults of mlx-lm's trainer, each shown in its own code and looked for in a run of ours."""

from safetrain.engine.cpu.blas import load_fast_blas

load_fast_blas()  # before anything here imports mlx

"""What makes mlx fast on a Linux CPU, and nothing else. A GPU uses none of it.

- ``blas``: OpenBLAS in front of the wheel's reference BLAS; freed memory is kept (benchmarks/bench_blas.py)
- ``quantized``: weights dequantized at each use (benchmarks/bench_ops.py)
- ``powers``: exponentials as powers of two in SwiGLU and cross-entropy (benchmarks/bench_ops.py)
- ``attention``: the same in attention, which never has all scores in memory (benchmarks/bench_attention.py)
- ``streams``: the shards of a micro-batch side by side, a thread each (benchmarks/bench_cpu.py)
"""

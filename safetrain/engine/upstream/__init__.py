"""The one door to mlx-lm: all that leans on its insides, each with a contract test (tests/engine/test_upstream.py)."""

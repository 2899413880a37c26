"""The only package that uses mlx-lm's internals; each use has a contract test (tests/engine/test_upstream.py)."""

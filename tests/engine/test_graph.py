"""Kernels are counted in mlx's graph, and nothing is computed for it."""

import mlx.core as mx

from safetrain.engine.graph import count_kernels, kernels_by_name, unevaluated


def test_views_launch_nothing_and_a_concatenation_copies_each_input() -> None:
    a, b = mx.ones((4, 8)), mx.ones((8, 4))
    mx.eval(a, b)
    product = a @ b
    assert count_kernels(product) == 1
    assert count_kernels({"sum": product.reshape(2, 8)[None].T}) == 1
    assert count_kernels(product, product + a[:, :4]) == 2  # what both need is computed once
    assert kernels_by_name(mx.concatenate([product, product, a], axis=1))["Concatenate"] == 3


def test_what_is_evaluated_already_costs_nothing_more() -> None:
    with unevaluated():
        total = (mx.ones((2, 2)) * 3).sum()
        mx.eval(total)
        assert count_kernels(total) > 0
    mx.eval(total)
    assert count_kernels(total) == 0

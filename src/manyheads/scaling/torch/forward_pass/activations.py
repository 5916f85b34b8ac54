"""Activations: two factors, in front of one and behind it, that explain the inputs of an MLP's second matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from manyheads.models.torch.lazy_torch import Tensor, torch

MOST = 512  # numbers that are compared
WIDEST, POINTS, ROUNDS = 9.0, 73, 5
"""Factors in front of an activation are sought up to exp(9), on so many points, refined so often."""


class Fit(NamedTuple):
    """The factors of the best fit, and its relative error."""

    before: float
    behind: float
    error: float


def fit_activation(x: Tensor, drawn: Sequence[Tensor], accuracy: float) -> Fit | None:
    """Return c and s with x = s f(c h), or with a gate s f(c g) h, of drawn h and g; None if no activation fits."""
    readings = list(_readings(drawn, x))
    if not readings or not x.numel():
        return None
    places = torch.linspace(0, x.numel() - 1, min(x.numel(), MOST), dtype=torch.float64).long().to(x.device)
    target, functions = x.double().flatten()[places], _activations()
    pairs = [tuple(each.double().flatten()[places] for each in reading) for reading in readings]

    def best(grid: Tensor, some: Sequence[Callable[[Tensor], Tensor]]) -> Fit:
        fits = (_fit(target, each, pair, grid) for each in some for pair in pairs)
        return min(fits, key=lambda fit: fit.error)

    found = best(torch.zeros(1, dtype=torch.float64, device=x.device), functions)
    if not found.error <= accuracy:  # the last is another one with a factor in front of it
        found = best(torch.linspace(-WIDEST, WIDEST, POINTS, dtype=torch.float64, device=x.device), functions[:-1])
    return found if found.error <= accuracy else None


def _fit(target: Tensor, function: Callable[[Tensor], Tensor], pair: tuple[Tensor, ...], grid: Tensor) -> Fit:
    """Return the best factor in front of an activation on a logarithmic grid, which is refined if it has a width."""
    for _ in range(ROUNDS if len(grid) > 1 else 1):
        values = function(grid.exp()[:, None] * pair[0]) * (pair[1] if len(pair) > 1 else 1.0)
        behind = (values @ target) / values.square().sum(1)
        errors = (target - behind[:, None] * values).norm(dim=1) / target.norm()
        at = int(errors.nan_to_num(torch.inf).argmin())
        found = Fit(float(grid[at].exp()), float(behind[at]), float(errors.nan_to_num(torch.inf)[at]))
        if len(grid) > 1:
            step = (grid[-1] - grid[0]) / (len(grid) - 1)
            grid = torch.linspace(-1, 1, len(grid), dtype=grid.dtype, device=grid.device) * step + grid[at]
    return found


def _readings(drawn: Sequence[Tensor], x: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield what may go into an activation, alone or with what its output is multiplied by."""
    alike = [each for each in drawn if each.numel() == x.numel()]
    for each in drawn:
        if each.numel() == 2 * x.numel():  # gate and input in one matrix, one after the other or in turn
            yield from permutations(each.chunk(2, -1))
            yield from permutations((each[..., ::2], each[..., 1::2]))
    yield from ((each,) for each in alike)
    yield from permutations(alike, 2)


def _activations() -> list[Callable[[Tensor], Tensor]]:
    """Return the activations in use; not those with parameters of their own."""
    f = torch.nn.functional
    names = ("gelu", "silu", "relu", "tanh", "sigmoid", "elu", "selu", "softplus", "mish", "leaky_relu", "hardswish")
    return [
        lambda x: x,
        lambda x: f.relu(x).square(),
        lambda x: f.gelu(x, approximate="tanh"),
        *(getattr(f, name) for name in names),
        lambda x: x * torch.sigmoid(1.702 * x),
    ]

"""Studies of depth, heads, richness and stability: what they conclude from made-up results with a known answer."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from manyheads.errors import UsageError
from manyheads.studies.dmft.head_diversity import HeadDiversity
from manyheads.studies.dmft.infinite_depth import InfiniteDepth
from manyheads.studies.dmft.infinite_heads import InfiniteHeads
from manyheads.studies.dmft.infinite_key_dim import InfiniteKeyDim
from manyheads.studies.dmft.key_dim_stability import KeyDimStability, amplification
from manyheads.studies.dmft.lazy_to_rich import LazyToRich
from manyheads.study.tables import on_grid
from manyheads.theory.dmft.finite.problems import digits_problem


def outcomes(study, predicted, trained, word):
    """Outcomes of the claims that a word is in."""
    return {verdict.outcome for verdict in study.compare(predicted, trained) if word in verdict.claim}


def in_cells(study, variables):
    """Replicates of all cells, as `run` hands them over: variables are functions of a cell, (replicates, ...)."""
    cells = study.cells()
    data = {
        name: (("replicate", "cell", *dims), np.stack([make(cell) for cell in cells], 1))
        for name, (dims, make) in variables.items()
    }
    coords = {name: ("cell", [cell[name] for cell in cells]) for name in cells[0]}
    return xr.Dataset(data, coords=coords)


@pytest.mark.parametrize(("power", "outcome"), [(1.0, "holds"), (0.5, "refuted")])
def test_a_distance_halves_with_depth_or_does_not(power, outcome, rng):
    study = InfiniteDepth(depths=(4, 8, 16, 32), steps=3, networks=2)
    shape, square = (3, 2, 1), (2, 4, 4)
    gap, trajectory, logits = (rng.standard_normal(size) for size in (shape, shape, square))

    def at(cell):
        near = 1 + 1 / cell["depth"]
        return trajectory + gap * near * cell["depth"] ** -power

    def size(cell):
        return 1.0 if cell["depth_exponent"] == 1 else cell["depth"] ** -power

    def noise(*sizes):
        return 0.01 * rng.standard_normal((4, *sizes))

    out, pairs = ("step", "read_out", "class"), ("sample", "token", "token_too")
    trained = in_cells(
        study,
        {
            "output": (("network", *out), lambda cell: at(cell) + noise(2, *shape)),
            "logits": (("network", *pairs), lambda cell: size(cell) * logits + 0.01 * noise(2, *square)),
            "limit_output": (out, lambda cell: at(cell) + 0 * noise(*shape)),
            "limit_logits": (pairs, lambda cell: size(cell) * logits + 0 * noise(*square)),
            "limit_size": ((), lambda cell: np.full(4, size(cell))),
        },
    )
    both = ("depth_exponent", *out)
    predicted = xr.Dataset(
        {"continuum": (both, np.stack([trajectory] * 2)), "without": (both, np.stack([trajectory + 9] * 2))},
        coords={"depth_exponent": [1.0, 0.5]},
    )
    assert outcomes(study, predicted, trained, "scales as 1/L") == {outcome}
    assert outcomes(study, predicted, trained, "are independent of depth") == {"holds"}
    assert outcomes(study, predicted, trained, "nearer to the continuum than f(2L)") == {"holds"}  # for either power
    assert outcomes(study, predicted, trained, "as the theory predicts") == {"holds"}
    assert outcomes(study, predicted, trained, "learned logits of the mean network") == {"holds"}
    uniform = trained["depth"] ** -1.0  # at exponent 1, too, while the theory's logits stay
    assert "refuted" in outcomes(
        study, predicted, trained.assign(logits=trained["logits"] * uniform), "learned logits of the mean network"
    )
    assert study.panels(predicted, trained)


@pytest.mark.parametrize(("power", "outcome"), [(2.0, "holds"), (1.0, "refuted")])
def test_motion_grows_like_the_square_of_the_richness_or_does_not(power, outcome, rng):
    study = LazyToRich(key_dims=(16, 64), steps=3, networks=2)
    lazy = rng.standard_normal((3, 2, 1))
    out = ("step", "read_out", "class")
    theory = lazy + np.asarray(study.richness)[:, None, None, None] ** 2
    predicted = xr.Dataset(
        {
            "output": (("richness", *out), theory),
            "output_without": (("richness", *out), theory + 5),
            "lazy": (out, lazy),
        },
        coords={"richness": list(study.richness)},
    )

    def scatter(cell, *sizes):
        return cell["key_dim"] ** -0.5 * rng.standard_normal((4, 2, *sizes)) / 10

    def limit(cell):
        return np.full(4, min(cell["richness"], 1.0) ** power)

    trained = in_cells(
        study,
        {
            "output": (("network", *out), lambda cell: lazy + cell["richness"] ** 2 + scatter(cell, 3, 2, 1)),
            "pooled": (("network", "read_out", "read_out_too"), lambda cell: scatter(cell, 2, 2)),
            "logits": (
                ("network", "layer", "sample", "token", "token_too"),
                lambda cell: cell["richness"] * (1 + scatter(cell, 1, 2, 2, 2)),
            ),
            **{f"limit_{name}": ((), limit) for name in ("output", "pooled", "logits")},
        },
    )
    assert outcomes(study, predicted, trained, "as gamma0^2 up to") == {outcome}
    assert outcomes(study, predicted, trained, "grows at most as") == {"holds"}
    assert outcomes(study, predicted, trained, "single network of") == {"holds"}
    assert outcomes(study, predicted, trained, "without response") == {"holds"}
    swapped = predicted.assign(output=predicted["output_without"], output_without=predicted["output"])
    assert outcomes(study, swapped, trained, "without response") == {"refuted"}
    assert study.panels(predicted, trained)


@pytest.mark.parametrize(("power", "spread", "outcome"), [(1.0, 1.0, "holds"), (0.5, 1.2, "refuted")])
def test_the_mean_network_nears_infinitely_many_heads_or_does_not(power, spread, outcome, rng):
    study = InfiniteHeads(logit_exponents=(1.0,), steps=3)
    out, square = ("step", "read_out", "class"), (2, 3)
    trajectory, gap = rng.standard_normal((3, 6, 1)), np.full((3, 6, 1), 0.3)

    def noise(cell, *sizes):
        return 0.4 * cell["heads"] ** -0.5 * rng.standard_normal((64, study.networks, *sizes))

    def variance(cell):  # of H heads, about their own mean
        return spread**2 * (1 - 1 / cell["heads"]) * (1 + noise(cell))

    trained = in_cells(
        study,
        {
            "output": (
                ("network", *out),
                lambda cell: trajectory + gap * cell["heads"] ** -power + noise(cell, 3, 6, 1),
            ),
            "logits": (("network", "layer", "pair"), lambda cell: noise(cell, *square)),
            "pooled": (("network", "row", "row_too"), lambda cell: noise(cell, 2, 2)),
            "variance_end": (("network",), variance),
        },
    )

    def draws(name, dims, value):
        drawn = value + 1e-3 * rng.standard_normal((8, 1, *np.shape(value)))
        return {name: (("prediction", "logit_exponent", *dims), drawn)}

    predicted = xr.Dataset(
        draws("output", out, trajectory)
        | draws("output_without", out, trajectory + 2)
        | draws("logits", ("layer", "pair"), np.zeros(square))
        | draws("pooled", ("row", "row_too"), np.zeros((2, 2)))
        | draws("variance_end", (), 1.0),
        coords={"logit_exponent": [1.0]},
    )
    assert outcomes(study, predicted, trained, "scales as H^(-1/2)") == {"holds"}  # for either power
    assert outcomes(study, predicted, trained, "as 1/H or faster") == {outcome}
    assert outcomes(study, predicted, trained, "is at most") == {outcome}
    assert outcomes(study, predicted, trained, "the std of attention logits over heads") == {outcome}
    assert outcomes(study, predicted, trained, "without response") == {"holds"}
    swapped = predicted.assign(output=predicted["output_without"], output_without=predicted["output"])
    assert outcomes(study, swapped, trained, "without response") == {"refuted"}


def test_the_variance_over_heads_grows_as_in_the_whole_theory(rng):
    study = HeadDiversity()
    sizes, seen = np.array(study.sizes()), np.array(study.training.key_dims)

    def drawn(grown):  # what is drawn at the start is there at the end, too
        return starts * np.exp(grown * (1 + 0.02 * rng.standard_normal(starts.shape)))

    starts = 1 / sizes * (1 + 0.05 * rng.standard_normal((8, 2, len(sizes))))
    dims = ("prediction", "logit_exponent", "key_dim")
    values = {"start": starts, "end": drawn(0.4), "without": drawn(0.3)}
    predicted = xr.Dataset(
        {f"variance_{when}": (dims, value) for when, value in values.items()},
        coords={"logit_exponent": [1.0, 0.5], "key_dim": sizes},
    )

    def networks(grown):
        start = 1 / seen * (1 + 0.1 * rng.standard_normal((2, 64, study.networks, len(seen))))
        ends = start * np.exp(grown + 0.02 * rng.standard_normal(start.shape))
        parts = {"variance_start": start, "variance_end": ends}

        def at(cell, name):
            place = (
                list(predicted["logit_exponent"].values).index(cell["logit_exponent"]),
                ...,
                study.training.key_dims.index(cell["key_dim"]),
            )
            return parts[name][place]

        return in_cells(study, {name: (("network",), lambda cell, name=name: at(cell, name)) for name in parts})

    def control(grown):
        trained = on_grid(networks(grown), predicted)
        parts = [[data.sel(logit_exponent=exponent) for data in (predicted, trained)] for exponent in (1.0, 0.5)]
        return [study._growth(1.0, *part).verdict().outcome for part in parts]

    assert control(0.4) == ["holds"] * 2
    assert control(0.3) == ["refuted"] * 2
    assert control(0.5) == ["refuted"] * 2


def test_what_is_sent_back_is_held_against_the_limit_and_not_without_responses(rng):
    study = KeyDimStability(steps=2)
    trained = in_cells(
        study, {"backward": (("step",), lambda cell: [1.4, 3.3] * (1 + 0.01 * rng.standard_normal((64, 2))))}
    )
    predicted = xr.Dataset({"backward": ("step", [1.4, 3.3]), "backward_without": ("step", [1.4, 2.8])})
    assert outcomes(study, predicted, trained, "that of the limit to 10%") == {"holds"}
    assert outcomes(study, predicted, trained, "that of the limit without") == {"refuted"}


def test_every_flag_of_the_training_reaches_what_is_trained():
    changed = {
        "steps": 5,
        "learning_rate": 0.05,
        "richness": 0.6,
        "depth": 3,
        "depth_exponent": 0.5,
        "norm": True,
        "momentum": 0.3,
    }
    for kind in (HeadDiversity, InfiniteHeads, InfiniteKeyDim, KeyDimStability):
        own = {name: value for name, value in changed.items() if hasattr(kind, name)}
        problem = kind(**own).problem()
        assert {name: getattr(problem, name) for name in own} == own


def test_what_is_sent_back_is_compared_on_tokens_in_the_loss_only():
    problem = digits_problem(samples=2, tests=1, steps=2)
    sizes = np.ones((2, problem.rows))
    sizes[0, :8], sizes[1, 8:] = 9.0, 0.0  # the test image has no error, and sends nothing back
    assert amplification(problem, sizes) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("study", "wrong"),
    [
        (InfiniteDepth(), {"depths": (2, 4, 6)}),
        (InfiniteDepth(), {"task": "music"}),
        (LazyToRich(), {"richness": (0.1, 1.0, 2.0)}),
        (LazyToRich(), {"richness": (0.01, 0.02, 0.05, 0.1, 1.0)}),
        (LazyToRich(), {"richness": ()}),
        (LazyToRich(), {"key_dims": (16,)}),
        (KeyDimStability(), {"key_dims": (16, 4)}),
        (KeyDimStability(), {"networks": 0}),
    ],
)
def test_what_cannot_be_judged_is_refused(study, wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        replace(study, **wrong)

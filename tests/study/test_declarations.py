"""Declared studies: settings, records, the grid, measures, and the pictures that follow."""

import inspect
import math
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace

import jax
import numpy as np
import pytest
import xarray as xr
from tests.study.toys import SOURCE

import manyheads.study as st
from manyheads.cli.flags import flags_of
from manyheads.statistics import fit_exponent
from manyheads.statistics.distances import squared_distance
from manyheads.statistics.exponents import fit_exponent_to_means
from manyheads.study import check_study
from manyheads.study.base import evaluated_claims
from manyheads.study.contract import ContractBroken
from manyheads.study.execution.units import train
from manyheads.study.reporting.standard import standard_panels
from manyheads.study.tables import on_grid, record

KINDS = ("normal", "flat")


class Means(st.Study):
    """Means of n draws from two distributions."""

    name = "toy/means"
    claim = "The error of a mean of n draws falls as the square root of n"
    source = SOURCE.at("part 4")

    sizes: tuple[int, ...] = st.sweep((4, 16, 64), "draws n", small=(4, 16), full=(4, 16, 64, 256))
    kinds: tuple[str, ...] = st.setting(KINDS, "distributions", choices=KINDS, order="distinct")
    repeats: int = st.setting(50, "means of a replicate", least=2)
    peek: bool = st.setting(False, "whether a claim reads its region off the data")

    def check(self) -> None:
        if self.repeats > 100 * self.sizes[0]:
            raise st.UsageError(f"repeats={self.repeats}: expected {100 * self.sizes[0]} or fewer")

    def cells(self) -> tuple[st.Cell, ...]:
        return st.grid(kind=self.kinds, size=self.sizes)

    def predict(self, key: jax.Array) -> st.Record:
        error = np.array([[1.0], [12**-0.5]])[: len(self.kinds)] * np.asarray(self.sizes) ** -0.5
        return {"size": ("size", list(self.sizes), "draws"), "error": (("kind", "size"), error, "rms error")}

    def train(self, key: jax.Array, kind: str, size: int) -> st.Record:
        rng = st.generator(self.independent(key, kind=kind, size=size))
        draws = rng.normal(size=(self.repeats, size)) if kind == "normal" else rng.random((self.repeats, size)) - 0.5
        means = draws.mean(1)
        return {
            "error": ((), (means**2).mean() ** 0.5, "rms error"),
            "mean": ("repeat", means, "mean"),
            "seconds": ((), 0.1, {"long_name": "time", "units": "s", "deterministic": False}),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> Iterator[st.Claim]:
        for kind in self.kinds:
            error = trained["error"].sel(kind=kind)
            yield st.Claim(
                f"The error falls as n^(-1/2), {kind}", st.exponent(error, "size", "n"), st.near(-0.5, 0.2), "wide"
            )
        spread = float(trained["error"].max()) if self.peek else 0.5
        ratio = st.log_ratio(trained["error"], theory["error"], quantity="error, measured over predicted (ln)")
        yield st.Claim("The error is as predicted", ratio, st.near(0, spread), "wide")


def test_a_class_is_a_frozen_dataclass_with_documented_settings():
    study = Means()
    with pytest.raises(FrozenInstanceError):
        study.repeats = 3
    assert (Means.small().sizes, Means.full().sizes, study.sizes) == ((4, 16), (4, 16, 64, 256), (4, 16, 64))
    assert inspect.getdoc(Means).endswith("peek\n    Whether a claim reads its region off the data.")
    assert {flag.name: flag.help for flag in flags_of(Means, study)}["--sizes"] == "Draws n."
    assert str(Means.source).endswith("part 4")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sizes": (16, 4)}, "sizes=.*rising order, each at least 1"),
        ({"kinds": ("normal", "odd")}, "kinds=.*choose from normal, flat"),
        ({"repeats": 1}, "repeats=1: expected an integer of at least 2"),
        ({"repeats": 401}, "expected 400 or fewer"),
    ],
)
def test_settings_are_checked_one_by_one_and_together(wrong, words):
    with pytest.raises(st.UsageError, match=words):
        replace(Means(), **wrong)


def test_a_declared_study_keeps_the_contract(seed):
    check_study(Means.small(), replicates=4, seed=seed)


def test_a_region_that_is_read_off_the_data_is_named(seed):
    with pytest.raises(ContractBroken, match=r"depend on what was measured.*as predicted"):
        check_study(replace(Means.small(), peek=True), replicates=4, seed=seed)


def test_a_record_labels_variables_and_takes_axes_from_the_grid():
    values = {"loss": (("heads", "step"), np.ones((2, 3)), "loss", "nat"), "where": ((), "far", "place", None)}
    found = record(values | {"step": ("step", [0, 1, 2], "updates")}, st.grid(heads=(4, 8), rate=(0.1,)))
    assert found["heads"].values.tolist() == [4, 8]
    assert (found["loss"].attrs, found["where"].attrs) == (
        {"long_name": "loss", "units": "nat"},
        {"long_name": "place"},
    )
    assert found["step"].attrs == {"long_name": "updates"}
    assert record(found) is found


def over_cells(cells, rng):
    """Data over cells, as a run hands it over."""
    data = {name: (("cell", "replicate", "i"), rng.random((len(cells), 2, 3)) > 0.5) for name in ("yes",)}
    data |= {"x": (("cell", "replicate"), rng.random((len(cells), 2))), "word": ("cell", [cell.slug for cell in cells])}
    coords = {name: ("cell", [cell[name] for cell in cells]) for name in cells[0]}
    return xr.Dataset(data, coords | {"cell": [cell.slug for cell in cells]})


def test_the_grid_of_a_product_keeps_values_types_and_memory(rng):
    cells = st.grid(kind=("b", "a"), size=(8, 4))
    trained = over_cells(cells, rng)
    found = on_grid(trained, xr.Dataset(coords={"size": ("size", [8, 4], {"long_name": "draws"})}))
    assert found["yes"].dims == ("replicate", "kind", "size", "i")
    assert found.attrs["axes"] == "kind size"
    assert found["size"].attrs == {"long_name": "draws"}
    assert found["yes"].dtype == bool
    assert np.shares_memory(found["x"].values, trained["x"].values)
    for place, cell in enumerate(cells):
        for name in trained.data_vars:
            there = trained[name].isel(cell=place).values
            assert (found[name].sel(dict(cell)).values == there).all()


def test_cells_that_a_grid_lacks_are_nan(rng):
    cells = tuple(st.Cell(series=name, size=size) for name, size in (("a", 1), ("a", 2), ("b", 2), ("b", 4)))
    trained = over_cells(cells, rng)
    found = on_grid(trained, xr.Dataset())
    assert found["x"].sizes == {"replicate": 2, "series": 2, "size": 3}
    assert np.isnan(found["x"].sel(series="a", size=4)).all()
    assert found["word"].sel(series="b", size=1).item() == ""
    kept = found["yes"].sel(series="b").dropna("size", how="all")
    assert kept["size"].values.tolist() == [2, 4]
    assert (kept.isel(size=0).values == trained["yes"].isel(cell=2).values).all()


def test_cells_in_another_order_and_a_single_cell(rng):
    cells = st.grid(kind=("a", "b"), size=(1, 2))
    turned = on_grid(over_cells((cells[0], cells[2], cells[1], cells[3]), np.random.default_rng(0)), xr.Dataset())
    trained = over_cells((cells[0], cells[2], cells[1], cells[3]), np.random.default_rng(0))
    assert (turned["x"].sel(kind="b", size=1).values == trained["x"].isel(cell=1).values).all()
    alone = xr.Dataset({"x": (("cell", "replicate"), np.ones((1, 2)))}, {"cell": ["only"]})
    assert on_grid(alone, xr.Dataset())["x"].dims == ("replicate",)


def replicates(rows, size=(4, 8, 16)):
    return xr.DataArray(np.asarray(rows, float), {"size": list(size)}, ("replicate", "size"))


def test_exponents_are_those_of_the_statistics(rng):
    rows = np.asarray([4, 8, 16]) ** -0.5 * np.exp(0.1 * rng.normal(size=(5, 3)))
    figure = st.exponent(replicates(rows).rename("error"), "size", "n")
    assert figure.value.replicate_exponents == pytest.approx(fit_exponent([4, 8, 16], rows).replicate_exponents)
    assert figure.quantity == "exponent of n"
    means = fit_exponent_to_means([4, 8, 16], rows.mean(0), rows.std(0, ddof=1) / 5**0.5, dof=4)
    assert st.exponent_of_mean(replicates(rows), "size").value.interval.width == pytest.approx(means.interval.width)
    wide = np.insert(rows, 1, np.nan, axis=1)
    assert st.exponent(replicates(wide, (4, 5, 8, 16)), "size").value.exponent == pytest.approx(figure.value.exponent)


@pytest.mark.parametrize("measure", [st.exponent, st.exponent_of_mean])
def test_what_has_no_figure_is_undecided_and_raises_nothing(measure):
    values = replicates([[1.0, 0.5, -0.1], [1.0, 0.4, -0.2]])
    for figure in (measure(values, "size"), st.log(values.isel(size=2)), values.isel(size=0)[:0]):
        verdict = st.Claim("c", figure, st.near(-1, 0.1), "a test").verdict()
        assert verdict.outcome == "inconclusive"
        assert math.isnan(verdict.figure)
        assert verdict.interval == (-math.inf, math.inf)


def test_samples_without_a_figure_are_counted():
    samples = xr.DataArray([1.0, np.nan, 2.0], dims="replicate")
    assert st.Claim("c", samples, st.near(1, 1), "a test").verdict().note == "2 of 3 replicates have a figure"


def test_a_figure_over_more_than_replicates_is_refused():
    with pytest.raises(st.UsageError, match=r"measured over .*size"):
        st.Claim("c", replicates([[1.0, 2.0, 3.0]]), st.near(0, 1), "a test").verdict()


@pytest.mark.parametrize(
    ("region", "ends"), [(st.near(2, 1), (1, 3)), (st.above(2), (2, math.inf)), (st.below(2), (-math.inf, 2))]
)
def test_regions_have_ends(region, ends):
    assert region.ends == ends
    assert st.near(2, (math.inf, 1)).ends == (-math.inf, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"region": st.near(0, -1)},
        {"region": st.near(math.nan, 1)},
        {"region": st.near(0, (1, 2, 3))},
        {"bounds": (1, 0)},
        {"expected": "true"},
        {"basis": 3},
    ],
)
def test_a_claim_of_wrong_parts_is_refused(wrong):
    with pytest.raises(st.UsageError, match=f"{next(iter(wrong))}=.* wrong type or range"):
        st.Claim(**{"text": "c", "figure": 1.0, "region": st.near(0, 1), "basis": "a test"} | wrong)


def test_distances_and_slopes(rng):
    first, second = (xr.DataArray(rng.random((4, 3, 5)), dims=("replicate", "size", "step")) for _ in range(2))
    away = (first.values - second.values) ** 2
    np.testing.assert_allclose(st.distance(first, second), away.mean((1, 2)) ** 0.5)
    np.testing.assert_allclose(st.distance(first, second, "step"), away.mean(2) ** 0.5)
    line = 3 * xr.DataArray(np.arange(5.0), dims="step") + first.isel(step=0, drop=True)
    np.testing.assert_allclose(st.slope(line, "step"), 3.0)
    np.testing.assert_allclose(st.slope(line, "step", [0, 2, 4, 6, 8]), 1.5)


def test_a_root_is_decided_in_squares(rng):
    found = squared_distance(rng.normal(0.5, 1, (400, 5)), rng.normal(0, 0.1, (8, 5)))
    figure, interval, _ = st.Root.of(found).decided(st.below(1))
    assert figure == found.distance
    assert (interval.low, interval.high) == (found.interval().low, found.interval().high)
    verdict = st.Claim("c", st.Root.of(found, 4), st.near(0, (math.inf, 0.001)), "a test").verdict()
    assert verdict.outcome == "refuted"


def test_draws_of_a_prediction_widen_the_interval(rng):
    sizes = np.asarray([4.0, 8.0, 16.0])
    values = replicates(sizes**-0.5 * np.exp(0.05 * rng.normal(size=(6, 3))))
    draws = xr.DataArray(0.01 * rng.normal(size=8), dims="prediction")
    found = st.over_draws(lambda limit, share: st.exponent(abs(values - limit), "size"), draws)
    _, interval, _ = found.value.decided(st.near(-0.5, 0.1))
    single = st.exponent(abs(values - draws.mean()), "size").value
    assert interval.width > single.interval.width
    sampled = st.over_draws(lambda limit, share: values.isel(size=0) - limit, draws)
    assert sampled.prediction_dof == 7
    assert sampled.prediction_error == pytest.approx(float(draws.std(ddof=1)) / 8**0.5)


def test_pictures_follow_from_claims_and_variables(rng):
    study = Means(sizes=(4, 16))
    cells = [[train(study, jax.random.key(row), cell) for row in range(3)] for cell in study.cells()]
    trained = xr.concat([xr.concat(row, "replicate") for row in cells], "cell")
    trained = trained.assign_coords({name: ("cell", [c[name] for c in study.cells()]) for name in ("kind", "size")})
    theory = record(study.predict(jax.random.key(0)), study.cells())
    grid = on_grid(trained, theory)
    panels = standard_panels(evaluated_claims(study, theory, trained), theory, grid)
    series, table = panels
    assert (series.title, series.x_label, series.log_x) == ("Rms error", "draws", True)
    assert [curve.label for curve in series.curves] == ["normal", "slope -0.5", "flat"]
    assert table.columns == ("kind", "size", "rms error")
    assert table.rows[0][2].endswith("(0.5)")


def test_variables_along_an_own_axis_are_drawn_beside_their_prediction():
    step = {"step": [0, 1, 2]}
    theory = xr.Dataset({"loss": ("step", [3.0, 2.0, 1.0])}, step)
    loss = (("cell", "replicate", "step"), np.ones((2, 4, 3)), {"long_name": "loss", "units": "nat"})
    trained = xr.Dataset({"loss": loss}, step | {"heads": ("cell", [2, 4])})
    (panel,) = standard_panels((), theory, on_grid(trained, theory))
    assert (panel.title, [curve.label for curve in panel.curves]) == ("Loss [nat]", ["trained", "predicted"])


def test_pictures_of_one_quantity_over_two_axes_are_told_apart():
    axes = {"step": [0, 1, 2], "time": [0.0, 0.5, 1.0]}
    theory = xr.Dataset({name: (axis, [3.0, 2.0, 1.0]) for name, axis in zip("ab", axes, strict=True)}, axes)
    both = {name: (("cell", "replicate", axis), np.ones((1, 4, 3)), {"long_name": "loss"}) for name, axis in
            zip("ab", axes, strict=True)}  # fmt: skip
    trained = xr.Dataset(both, axes | {"heads": ("cell", [2])})
    panels = standard_panels((), theory, on_grid(trained, theory))
    assert [panel.title for panel in panels] == ["Loss, over step", "Loss, over time"]


def test_trajectories_end_where_all_have_settled():
    time = np.linspace(0, 100, 101)
    loss = np.exp(-time)
    part = xr.Dataset(
        {"time": (("replicate", "record"), [time, time]), "loss": (("replicate", "record"), [loss, loss])}
    )
    panel = st.trajectories(
        "loss", part, "time", "loss", levels=xr.DataArray([1.0, 0.0], attrs={"long_name": "saddles"})
    )
    assert [curve.label for curve in panel.curves] == ["replicate 0", "replicate 1", "saddles", ""]
    assert max(panel.curves[0].x) < 10
    assert st.table("t", [{"a": "1", "b": "2"}]).columns == ("a", "b")

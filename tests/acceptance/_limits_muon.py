"""Muon beside AdamW along N, H, L and D: the table, and the recipes in use."""

from pathlib import Path
from typing import Any

from tests.acceptance._lane import Figure, Measured
from tests.acceptance._limits_checks import verdicts_of
from tests.acceptance._studies import run_study, words_of

from manyheads.scaling.axes import LETTERS
from manyheads.studies.scaling.learning_rates.muon_transfer import MuonTransfer
from manyheads.studies.scaling.muon_coordinates import OWN_WEIGHTS, MuonCoordinates
from manyheads.studies.scaling.shared.optimal_rates import drift_of
from manyheads.study import open_run
from manyheads.study.tables import on_grid

QUERIES = ("query_by_weights", "key_by_weights")
OTHERS = tuple(name for name in OWN_WEIGHTS if name not in QUERIES)
SLOPES: list[tuple[str, str, tuple[str, ...], int, float, float]] = [  # recipe, axis, quantities, place, least, most
    *(("muon", axis, OWN_WEIGHTS, -1, -0.05, 0.05) for axis in ("key_dim", "heads", "depth", "stream")),
    ("muon-half-logit", "key_dim", QUERIES, -1, -0.55, -0.45),
    ("muon-half-logit", "key_dim", OTHERS, -1, -0.05, 0.05),
    ("muon-half-depth", "depth", OWN_WEIGHTS, -1, -0.55, -0.45),
    ("muon-half-depth", "depth", ("output_by_weights",), -1, -0.7, -0.5),
    *(("muon", axis, ("residual", "outputs"), -1, -0.3, 0.3) for axis in ("key_dim", "depth")),
    ("muon", "heads", ("residual", "outputs"), -1, -0.2, 0.2),
    *(("moonlight", axis, ("query_by_weights",), -1, 0.35, 9.0) for axis in ("key_dim", "heads")),
    ("keller", "depth", ("residual",), -1, 0.7, 9.0),
    ("none", "stream", ("query_by_weights",), -1, 0.4, 9.0),
    ("heads-none", "heads", ("query_by_weights",), 0, 0.35, 9.0),
    ("muon-heads", "heads", ("query_by_weights",), 0, -0.15, 0.15),
    ("heads-spectral", "heads", ("output_by_weights",), 0, 0.6, 9.0),
]
TEXT: list[tuple[str, str, tuple[str, ...], int, float, float]] = [
    ("muon", "heads", OWN_WEIGHTS, -1, -0.05, 0.05),
    ("muon-heads", "heads", ("query_by_weights",), -1, -0.9, -0.1),
    ("heads-none", "heads", ("query_by_weights",), -1, 0.2, 9.0),
]
LARGER = [  # of the MLP's output matrix, whose inputs fill more directions than a small one has rows
    ("muon", "heads", ("mlp_out_by_weights",), -1, -0.05, 0.05),
    ("muon", "stream", ("mlp_out_by_weights",), -1, -0.05, 0.05),
]
DRIFTING, FRESH = 16, "--seed 1"  # more replicates than four undecided ones, with fresh seeds
DRIFTS = [  # recipe, axis, least and most decades over a factor of eight
    *(("muon", axis, -0.25, 0.25) for axis in ("key_dim", "heads", "depth")),
    *(("moonlight", axis, -9.0, -0.5) for axis in ("key_dim", "heads")),
    ("keller", "depth", -9.0, -0.5),
    ("heads-none", "heads", -9.0, -0.25),
    ("heads-keller", "heads", -9.0, -0.35),
]
BESIDE = [  # the same beside AdamW for all weights
    ("muon", "heads", -0.25, 0.25),
    ("mup", "heads", -9.0, 9.0),
    ("standard", "heads", -9.0, -0.5),
]


def seeds_of(flags: str, replicates: int) -> str:
    """Return the seed of a command and its replicates, for people."""
    words = flags.split()
    return f"{words[words.index('--seed') + 1] if '--seed' in words else '0'}, replicates 0-{replicates - 1}"


def slopes(folder: Path, replicates: int, flags: str, text: bool = False, **sizes: list[int]) -> Measured:
    """Fitted exponents, each within what is required of it; with sizes those of `LARGER`."""
    run = open_run(run_study(words_of("limits/muon-coordinates", replicates, flags))[0])
    trained = on_grid(run["trained"].to_dataset(), run["predicted"].to_dataset())
    rows = LARGER if sizes else TEXT if text else SLOPES
    axes = tuple(dict.fromkeys(axis for _, axis, *_ in rows))
    grown: dict[str, Any] = {name: tuple(values) for name, values in sizes.items()}
    setting = MuonCoordinates(task="text" if text else "digits", axes=axes, **grown)
    shown, extents, passed = [], [], True
    for recipe, axis, quantities, place, least, most in rows:
        for quantity in quantities:
            fit = setting.exponent(trained, recipe, axis, quantity, place)  # type: ignore[arg-type]
            passed &= least <= fit.exponent <= most
            shown.append(f"{recipe}: {quantity} {LETTERS[axis]}^{fit.exponent:.2f}")  # type: ignore[index]
            extents.append(f"[{fit.interval.low:.2f}, {fit.interval.high:.2f}]")
    return Measured("<br>".join(shown), "<br>".join(extents), seeds_of(flags, replicates), passed)


def drifts(folder: Path, replicates: int, axes: list[str], flags: str, beside: bool = False) -> Measured:
    """Drifts of the optimal learning rate, each within what is required of it."""
    run = open_run(run_study(words_of("limits/muon-transfer", replicates, flags))[0])
    trained = on_grid(run["trained"].to_dataset(), run["predicted"].to_dataset())
    names = ("muon", "mup", "standard") if beside else MuonTransfer().parametrizations
    plan = MuonTransfer(axes=tuple(axes), parametrizations=names).plan()
    shown, extents, passed = [], [], True
    for recipe, axis, least, most in (row for row in (BESIDE if beside else DRIFTS) if row[1] in axes):
        optima = plan.along(trained, "optimal_learning_rate", recipe, axis)  # type: ignore[arg-type]
        middle, low, high = drift_of(optima, axis).decades  # type: ignore[arg-type]
        passed &= least <= middle <= most
        shown.append(f"{recipe} along {LETTERS[axis]}: {middle:+.2f}")  # type: ignore[index]
        extents.append(f"[{low:+.2f}, {high:+.2f}]")
    return Measured("<br>".join(shown), "<br>".join(extents), seeds_of(flags, replicates), passed)


def drift_figure(axis: str, name: str, required: str) -> Figure:
    """Return the figure of one axis."""
    flags = f"--axes {axis} {FRESH}"
    return Figure(
        f"muon-drifts-{name}",
        f"drift of Muon's optimal learning rate over a factor of eight in {LETTERS[axis]}, in decades",  # type: ignore[index]
        required,
        drifts,
        {"replicates": DRIFTING, "axes": [axis], "flags": flags},
        command=words_of("limits/muon-transfer", DRIFTING, flags),
    )


ON_TEXT = "--task text --axes heads --parametrizations muon muon-heads heads-none --batch 8"

AT_LARGER = (
    "--axes heads stream --parametrizations muon --seed 5 --heads-counts 8 16 32 --streams 64 128 256 --workers 1"
)
BESIDE_ADAMW = "--axes heads --parametrizations muon mup standard --seed 4"

FIGURES = (
    verdicts_of("limits/muon-coordinates", "muon-coordinates", "Muon, 1 and 25 steps: what is flat, what breaks", 6),
    Figure(
        "muon-slopes",
        "exponents of updates by weights, stream and outputs under Muon's table and common recipes",
        "by weights 0 +- .05, -.50 +- .05 at exponents 1/2; stream and outputs .3 (.2 over H); Moonlight >= .35, "
        "Keller over L >= .7, no factor over D >= .4, per head as derived",
        slopes,
        {"replicates": 6, "flags": ""},
        command=words_of("limits/muon-coordinates", 6),
    ),
    Figure(
        "muon-slopes-text",
        "the same over H on text, whole and per head",
        "whole 0 +- .05; per head no factor >= .2, table <= -.1",
        slopes,
        {"replicates": 4, "flags": ON_TEXT, "text": True},
        command=words_of("limits/muon-coordinates", 4, ON_TEXT),
    ),
    Figure(
        "muon-slopes-larger",
        "updates by the MLP's output matrix under Muon's table at larger H and D, where finite size matters less",
        "0 +- .05",
        slopes,
        {
            "replicates": 6,
            "flags": AT_LARGER,
            "heads_counts": [8, 16, 32],
            "streams": [64, 128, 256],
        },
        command=words_of("limits/muon-coordinates", 6, AT_LARGER),
    ),
    *(
        verdicts_of(
            "limits/muon-transfer",
            f"muon-transfer-{name}",
            f"digits along {LETTERS[axis]}: Muon's optimal learning rate",  # type: ignore[index]
            DRIFTING,
            f"--axes {axis} {FRESH}",
        )
        for axis, name in (("key_dim", "key-dim"), ("heads", "heads"), ("depth", "depth"))
    ),
    drift_figure("key_dim", "key-dim", "table within .25; Moonlight at least .5"),
    drift_figure("heads", "heads", "table within .25; Moonlight at least .5; per head no factor .25, Keller .35"),
    drift_figure("depth", "depth", "table within .25; Keller at least .5"),
    Figure(
        "muon-drifts-beside-adamw",
        "the same along H, in one run with AdamW for all weights: width-only (mup), and one learning rate",
        "Muon's table within .25; one rate at least .5; mup is shown",
        drifts,
        {"replicates": 8, "axes": ["heads"], "flags": BESIDE_ADAMW, "beside": True},
        command=words_of("limits/muon-transfer", 8, BESIDE_ADAMW),
    ),
)

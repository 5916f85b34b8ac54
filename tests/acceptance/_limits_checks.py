"""Coordinate checks, learning-rate transfer and head diversity of transformers, over at least eight seeds."""

from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import run_study, study, words_of

from manyheads.scaling.axes import LETTERS
from manyheads.studies.scaling.coordinate_check import CoordinateCheckStudy
from manyheads.study import open_run
from manyheads.study.tables import on_grid

WIDEST = {"key_dim": 0.35, "heads": 0.2, "depth": 0.35}  # what is required of plain slopes, without their derivation


def plain_slopes(
    folder: Path, replicates: int, flags: str, optimizer: str, axes: list[str], seed: int = 0, **sizes: list[int]
) -> Measured:
    """Both exponents one: plain slopes of outputs, stream, logits and values, all intervals within the widest."""
    run = open_run(run_study(words_of("limits/coordinate-check", replicates, flags))[0])
    trained = on_grid(run["trained"].to_dataset(), run["predicted"].to_dataset())
    parametrizations = tuple(dict.fromkeys(["limits", *map(str, trained["parametrization"].values)]))
    grown = {name: tuple(values) for name, values in sizes.items()}
    setting = CoordinateCheckStudy(optimizer=optimizer, axes=tuple(axes), parametrizations=parametrizations, **grown)
    shown, extents, passed = [], [], True
    for axis in axes:
        for growth in setting.growths(trained, "limits", axis):  # type: ignore[arg-type]
            if growth.quantity == "query_by_weights":
                continue
            interval = growth.fit.interval if growth.fit else None
            reached = max(abs(interval.low), abs(interval.high)) if interval else np.inf
            passed &= reached <= WIDEST[axis]
            shown.append(f"{growth.module}: {LETTERS[axis]}^{growth.fit.exponent:.2f} after {growth.step} steps")
            extents.append(f"[{interval.low:.2f}, {interval.high:.2f}]")
    return Measured("<br>".join(shown), "<br>".join(extents), f"{seed}, replicates 0-{replicates - 1}", bool(passed))


def verdicts_of(name: str, title: str, claim: str, replicates: int = 8, flags: str = "", revision: int = 1) -> Figure:
    settings = {"name": name, "replicates": replicates, "flags": flags}
    command = words_of(name, replicates, flags)
    return Figure(title, claim, "every verdict as expected", study, settings, command, revision)


ALL = "--axes key_dim heads depth"
SGD = "--optimizer sgd"
DEPTH = "--optimizer sgd --axes depth --parametrizations limits half-depth standard"
LARGER = "--axes key_dim --parametrizations limits --key-dims 32 64 128 --seed 1"

FIGURES = (
    verdicts_of(
        "limits/coordinate-check", "coordinates-adam", "Adam, 4 and 25 steps: what is flat, what breaks, and where"
    ),
    verdicts_of("limits/coordinate-check", "coordinates-sgd", "gradient descent, 60 steps", flags=SGD, revision=2),
    verdicts_of("limits/coordinate-check", "coordinates-sgd-depth", "gradient descent along L", 16, DEPTH, 2),
    verdicts_of(
        "limits/coordinate-check",
        "coordinates-adam-key-dim",
        "Adam along N, with the replicates that 8 undecided ones asked for, and fresh seeds",
        48,
        "--axes key_dim --parametrizations limits --seed 1",
    ),
    verdicts_of(
        "limits/coordinate-check",
        "coordinates-sgd-key-dim",
        "gradient descent along N, with more replicates and fresh seeds",
        32,
        f"{SGD} --axes key_dim --parametrizations limits half-logit --seed 1",
    ),
    verdicts_of(
        "limits/coordinate-check",
        "coordinates-sgd-heads",
        "gradient descent along H, with more replicates and fresh seeds",
        32,
        f"{SGD} --axes heads --parametrizations limits --seed 1",
    ),
    verdicts_of("limits/coordinate-check", "coordinates-text", "Adam on text", flags="--task text"),
    verdicts_of(
        "limits/coordinate-check",
        "coordinates-text-larger",
        "the same at larger N and H, where finite size matters less",
        flags="--task text --axes key_dim heads --parametrizations limits half-logit "
        "--key-dims 32 64 128 --heads-counts 16 32 64 --seed 1",
    ),
    Figure(
        "plain-slopes-adam",
        "both exponents one, Adam: outputs, stream, logits and values move as N^0, H^0, L^0",
        "|slope| <= 0.35 in N and L, 0.2 in H, with its interval",
        plain_slopes,
        {"replicates": 8, "flags": "", "optimizer": "adam", "axes": ["key_dim", "heads", "depth"]},
        command=words_of("limits/coordinate-check", 8, ""),
    ),
    Figure(
        "plain-slopes-adam-larger",
        "the same along N at larger N, where finite size matters less",
        "|slope| <= 0.35, with its interval",
        plain_slopes,
        {
            "replicates": 16,
            "flags": LARGER,
            "optimizer": "adam",
            "axes": ["key_dim"],
            "seed": 1,
            "key_dims": [32, 64, 128],
        },
        command=words_of("limits/coordinate-check", 16, LARGER),
    ),
    Figure(
        "plain-slopes-sgd-depth",
        "both exponents one, gradient descent: the same along L",
        "|slope| <= 0.35, with its interval",
        plain_slopes,
        {"replicates": 16, "flags": DEPTH, "optimizer": "sgd", "axes": ["depth"]},
        command=words_of("limits/coordinate-check", 16, DEPTH),
        revision=2,
    ),
    verdicts_of(
        "limits/weight-decay", "weight-decay", "AdamW over H: no, coupled and independent decay, table and one rate", 6
    ),
    verdicts_of("limits/batch-and-horizon", "batch-and-horizon", "Adam: batch size and number of steps"),
    verdicts_of("limits/learning-rate-transfer", "transfer-digits", "digits, along N: the optimal learning rate"),
    verdicts_of("limits/learning-rate-transfer", "transfer-digits-all", "digits, along N, H and L", flags=ALL),
    verdicts_of(
        "limits/learning-rate-transfer",
        "transfer-depth",
        "digits along L, with the replicates that 16 undecided ones asked for, and fresh seeds",
        32,
        "--axes depth --parametrizations limits mup --seed 2",
    ),
    verdicts_of(
        "limits/learning-rate-transfer",
        "transfer-text",
        "text, along N, H and L",
        flags=f"--task text --steps 60 {ALL}",
    ),
    verdicts_of(
        "limits/learning-rate-transfer",
        "transfer-text-key-dim",
        "text along N, with the replicates that 8 undecided ones asked for, and fresh seeds",
        32,
        "--task text --steps 60 --axes key_dim --parametrizations limits half-logit --seed 1",
    ),
    verdicts_of(
        "limits/head-diversity",
        "heads-digits",
        "Adam: variance of logits over heads against N, measured before the merger with attention-over-heads",
        flags="--optimizer adam",
    ),
    verdicts_of(
        "limits/head-diversity",
        "heads-digits-sgd",
        "the same after SGD, for which the exponent is derived",
        flags="--optimizer sgd --seed 1",
    ),
    verdicts_of("limits/head-diversity", "heads-text", "the same on text", flags="--optimizer adam --task text"),
)

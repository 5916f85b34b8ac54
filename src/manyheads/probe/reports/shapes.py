"""Theory's reading of recorded curves: drop and rebound of attention entropy and of the stable rank of the lower MLP.

JoMA derives for a nonlinear activation that attention first concentrates on salient tokens and then spreads again: the
entropy of attention and the stable rank of the MLP's lower matrix drop and rebound. A rebound says which layer, at
which step; it does not predict the final loss.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import xarray as xr
from manyheads._namespaces import Floats
from manyheads.curves.curve_files import RunCurves
from manyheads.curves.curve_shapes import LEAST, CurveShape, shape_at
from manyheads.errors import FileRefused
from manyheads.models.modules import Role
from manyheads.probe.live.reading import open_recording

LOWER = (Role.MLP_IN, Role.MLP_GATE)
# A layer whose heads all pass a smaller share of the gradient through the softmax gets none in bfloat16.
LEAST_GRADIENT = 2.0**-8


class Reading(NamedTuple):
    """Curve of one layer, and its shape."""

    figure: str  # "entropy" (mean over heads) or "stable rank" (of a lower MLP matrix)
    layer: int
    name: str  # of the attention module or matrix
    steps: NDArray[np.int64]
    values: Floats
    level: float  # its null level: the entropy of uniform attention, the stable rank of a Gaussian matrix
    shape: CurveShape | None  # None if there are too few steps
    heads: Counter[str]  # number of heads of each shape, for entropies
    # First step from which no head of the layer passes gradients through its softmax in bfloat16; None: none
    collapsed: int | None


def read_shapes(tree: "xr.DataTree") -> list[Reading]:
    """Tell the shapes of the curves of a recording of a fixed batch, layer by layer; a shape takes 20 steps."""
    return [*_entropies(tree), *_ranks(tree)]


def summarize_shapes(readings: list[Reading]) -> list[str]:
    """Say in how many layers the figures drop and rebound, as the theory has it."""
    sentences = []
    for figure, words in (("entropy", "attention entropy"), ("stable rank", "stable rank of the lower MLP matrix")):
        shapes = [reading.shape for reading in readings if reading.figure == figure]
        known = [shape.label for shape in shapes if shape]
        if shapes and not known:
            sentences.append(f"{words}: no shape, which takes {LEAST} checkpoints")
        elif known:
            counts = ", ".join(f"{label} {count}" for label, count in Counter(known).most_common())
            of = "layers" if len(known) == len({reading.layer for reading in readings}) else "matrices"
            verdict = f"drop and rebound in {known.count('rebounded')} of {len(known)} {of}"
            sentences.append(f"{words}: {verdict} ({counts})")
    return sentences + [
        f"layer {each.layer} has collapsed from step {each.collapsed} on"
        for each in readings
        if each.collapsed is not None
    ]


def curves_of(store: Path) -> RunCurves:
    """Return the curves of a recording as those of one run, to be judged beside others; FileRefused if it has none."""
    readings = read_shapes(open_recording(store))
    figures, levels, steps = {}, {}, np.zeros(0, np.int64)
    for figure, words in (("entropy", "entropy"), ("stable_rank", "stable rank")):
        chosen = {reading.layer: reading for reading in readings if reading.figure == words}
        if chosen:
            steps = next(iter(chosen.values())).steps
            figures[figure] = np.stack([chosen[layer].values for layer in sorted(chosen)], axis=1)
            levels[figure] = float(np.mean([reading.level for reading in chosen.values()]))
    if not figures:
        raise FileRefused(f"{store} holds neither attention of a fixed batch nor weights: no curves to judge")
    return RunCurves(store.resolve().name, steps, figures, levels)


def _entropies(tree: "xr.DataTree") -> Iterator[Reading]:
    if "attention_fixed" not in tree.children or "entropy" not in tree["attention_fixed"]:
        return
    found = tree["attention_fixed"].to_dataset()
    steps = found.step.values
    for place, layer in enumerate(found.layer.values.tolist()):
        heads = found.entropy.sel(layer=layer).dropna("head", how="all").transpose("head", "step").values
        mean = heads.mean(axis=0)
        labels: Counter[str] = Counter(shape.label for head in heads if (shape := shape_at(head, steps)))
        name, level = str(found["module"].values[place]), float(found.entropy_uniform.sel(layer=layer).values[-1])
        shape, collapsed = shape_at(mean, steps), _collapse(found.sel(layer=layer))
        yield Reading("entropy", layer, name, steps, mean, level, shape, labels, collapsed)


def _collapse(layer: "xr.Dataset") -> int | None:
    """Return the first step from which the mean trace of the softmax's Jacobian is negligible in every head."""
    if "collision" not in layer:
        return None
    trace = 1 - layer.collision.transpose("step", "head").values
    dead = ((trace < LEAST_GRADIENT) | np.isnan(trace)).all(axis=1) & ~np.isnan(trace).all(axis=1)
    since = np.logical_and.accumulate(dead[::-1])[::-1]
    return int(layer.step.values[np.argmax(since)]) if since.any() else None


def _ranks(tree: "xr.DataTree") -> Iterator[Reading]:
    if "weights" not in tree.children:
        return
    found = tree["weights"].to_dataset()
    steps = found.step.values
    lower = found.isel(matrix=np.isin(found.role.values, LOWER))
    for name, layer in zip(lower.matrix.values, lower.matrix_layer.values.tolist(), strict=True):
        matrix = lower.sel(matrix=name)
        values, random = matrix.stable_rank.values, float(matrix.stable_rank_random.values[-1])
        shape = shape_at(values, steps)
        yield Reading("stable rank", layer, str(name), steps, values, random, shape, Counter(), None)

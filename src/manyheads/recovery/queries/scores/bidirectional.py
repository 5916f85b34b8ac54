r"""Layers whose rows see later tokens too, with terms of the offset on both sides (the encoder of T5).

Prefix by prefix, the last rows are those of a causal layer, which is extracted: heads, forms, and the terms b(t) of
earlier tokens, t >= 0. First rows see later tokens alone, and the same forms: their scores give b(-t) up to a constant,
which is settled at the offset 0. Forms that turn with the offset are refused. Derived here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from manyheads.recovery._types import Array
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.layers.scores import ScoreLayer
from manyheads.recovery.oracle.oracle import Behind, Oracle, Read
from manyheads.recovery.queries.scores import positions
from manyheads.recovery.queries.scores.reading import ScoreReader
from manyheads.recovery.refusals import FitError, LimitError, NotALayer
from manyheads.recovery.result.results import Extracted, StageLog

SPREAD = 1e-2  # misfit of terms that are read several times


class Reading(NamedTuple):
    """How scores are read: the reader, what draws tokens (n, d), and how many keys a sequence takes."""

    reader: ScoreReader
    tokens: Callable[[int], Array]
    keys: int


class Backwards(Behind):
    """An oracle that is asked from the end: its last row is the first one."""

    def answer(self, x: Array, read: Read) -> Array:
        """Return the row of the last token of x (n, k, d), which stands first."""
        assert read == "last"
        return self.behind(x[:, ::-1], read=(0,))[:, 0]


def extract_bidirectional(
    oracle: Oracle, extract: Callable[[Oracle], tuple[RotaryLayer, Reading]], log: StageLog, noise: float
) -> Extracted:
    """Extract a layer whose rows see later tokens, by `extract`, which asks as of a causal one."""
    if oracle.limits.last_row:
        raise LimitError("rows see later tokens: other scores are read from all rows, and the last alone is shown")
    # every row is the last one of a prefix
    layer, reading = extract(Behind(oracle, causal=True, limits=replace(oracle.limits, last_row=True)))
    if not (isinstance(layer, ScoreLayer) and layer.position_bias is not None and layer.sink is None):
        what = "later tokens are seen, and scores turn or stand beside sinks: these are extracted from causal layers"
        raise NotALayer(f"{what} alone")
    with log.stage("later tokens") as figures:
        backwards = replace(reading.reader, oracle=Backwards(oracle))
        later, _, rest = positions.read_terms(backwards, layer.form(1), reading.tokens, reading.keys, None, noise)
        earlier = layer.position_terms(later.shape[1])
        figures["misfit"] = rest
        FitError.if_above(rest, SPREAD, "later tokens have other scores than earlier ones and a term of the offset")
        later = later - later[:, :1] + earlier[:, :1]
    found = replace(layer, position_bias=earlier, slopes=None, later_bias=later)
    return as_extracted(found, log)


def as_extracted(layer: RotaryLayer, log: StageLog) -> Extracted:
    """Return a layer as the result of the method."""
    longest = None
    if isinstance(layer, ScoreLayer) and layer.position_bias is not None and layer.slopes is None:
        longest = None if layer.window is not None else layer.position_bias.shape[1]
    parts = layer.parts() if isinstance(layer, ScoreLayer) else []
    acts_on = "the tokens, offset by offset" + "".join(f"; {part}" for part in parts)
    return Extracted(layer, tuple(log.stages), acts_on, longest=longest)  # type: ignore[arg-type]

"""`manyheads probe weights` and `probe verify`: weights and verification of checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Union

import tyro

from manyheads._extras import xarray as xr
from manyheads._json import Json, json_ready
from manyheads._overview import printable, render_table
from manyheads.cli.parsing import OptionalPath, Switch
from manyheads.errors import UsageError

if TYPE_CHECKING:
    from manyheads.probe.checkpoints.series import Source

SHOWN = 6  # checkpoints of a series that fit beside one another in a terminal
COLUMNS = {
    "frobenius": "Frobenius", "spectral": "spectral", "spectral_random": "(random)", "beyond_edge": "beyond",
    "stable_rank": "stable rank", "stable_rank_random": "(random)", "effective_rank": "effective",
    "participation_ratio": "participation", "coherence": "coherence", "coherence_random": "(random)",
}  # fmt: skip
Paths = Annotated[
    Union[None, tuple[Path, ...]], tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT ...", help_behavior_hint="")
]


@dataclass(frozen=True)
class Weights:
    """Measure norms, stable rank and coherence of the weights of checkpoints, without the model.

    CHECKPOINT is a .safetensors file, or a folder with one or with shards and their index, or a folder of such.
    Several are a series of one model, in the order of their steps where every name holds one (step1000,
    checkpoint-500). Each figure stands beside its null level: (random).
    """

    checkpoints: Paths = None  # Files or folders in safetensors format.
    tolerance: float = 1e-3  # Certified relative width of stable ranks beyond a smaller side of 1024.
    rows: int = 256  # Vectors drawn for the coherence.
    seed: int = 0  # Seed of the draw.
    follow_links: Switch = False  # Files may be symbolic links, as in a Hugging Face cache.
    json: Switch = False  # Print JSON instead of tables.

    def run(self) -> int:
        """Measure and print; return the exit status."""
        from manyheads.models.checkpoints.checkpoint import open_checkpoint
        from manyheads.probe import weight_spectra
        from manyheads.probe.checkpoints.series import path_of, sort_by_step

        paths = map(path_of, sort_by_step(given_checkpoints(self.checkpoints)))
        opened = [open_checkpoint(path, follow_links=self.follow_links) for path in paths]
        found = weight_spectra(opened, tolerance=self.tolerance, rows=self.rows, seed=self.seed)
        print(json.dumps(as_json(found), indent=1) if self.json else _as_text(found))
        return 0


@dataclass(frozen=True)
class Verify:
    """Check whether a checkpoint series is what it says: files, copies, dtypes, order of the steps, altered tensors.

    CHECKPOINT is a .safetensors file, or a folder with one or with shards and their index, or a folder of such. Where
    every name holds a step (step1000, checkpoint-500) they are compared in the order of the steps.
    """

    checkpoints: Paths = None  # Files or folders in safetensors format.
    against: OptionalPath = None  # Reference checkpoint, or a folder of them, compared by step.
    follow_links: Switch = False  # Files may be symbolic links, as in a Hugging Face cache.
    json: Switch = False  # Print JSON instead of sentences.
    strict: Switch = False  # Exit with 1 if anything is found.

    def run(self) -> int:
        """Verify and print; return the exit status, 3 if no checkpoint can be read."""
        from manyheads.probe import verify_checkpoints

        against = None if self.against is None else given_checkpoints((self.against,))
        found = verify_checkpoints(given_checkpoints(self.checkpoints), against=against, follow_links=self.follow_links)
        text = json.dumps(found.as_dict(), indent=1) if self.json else str(found)
        print("\n".join(map(printable, text.splitlines())))
        if not found.compared:
            return 3
        return 1 if self.strict and not found.passed else 0


def given_checkpoints(paths: tuple[Path, ...] | None) -> list[Source]:
    """Return the checkpoints of the command line, of a folder of checkpoints all; UsageError if there is none."""
    if not paths:
        raise UsageError("CHECKPOINT is missing: give files or folders in safetensors format")
    found: list[Source] = []
    for path in paths:
        inside = [] if any(path.glob("*.safetensors")) else {file.parent for file in path.glob("*/*.safetensors")}
        found += sorted(inside) or [path]
    return found


def as_json(found: xr.Dataset) -> dict[str, Json]:
    """Return a JSON-ready dictionary, null where a figure does not exist."""
    coordinates = {str(name): values.values.tolist() for name, values in found.coords.items()}
    figures = {
        str(name): {"dims": list(values.dims), "values": json_ready(values.values.tolist())}
        for name, values in found.data_vars.items()
    }
    return {"attributes": dict(found.attrs), "coordinates": coordinates, "figures": figures}


def _as_text(found: xr.Dataset) -> str:
    """Return tables of the matrices and of the circuits of heads."""
    one, said = found.sizes["checkpoint"] == 1, found.attrs
    texts = [_series(found, name) for name in ("stable_rank", "spectral", "coherence")]
    texts = [_matrices(found.isel(checkpoint=0))] if one else texts
    texts += [_circuits(found.isel(checkpoint=-1))] if "head_stable_rank" in found else []
    texts += [f"not measured: {said['not_measured']}"] if said["not_measured"] else []
    texts += [f"{name}: {said[name]}" for name in ("roles", "heads") if said[name].startswith("none")][:1]
    return "\n".join(map(printable, "\n\n".join(texts).splitlines()))


def _matrices(found: xr.Dataset) -> str:
    head = ("matrix", "shape", *COLUMNS.values())
    rows = []
    for name in found.matrix.values:
        one = found.sel(matrix=name)
        cells = {figure: number(one[figure].item()) for figure in COLUMNS}
        half = (one.coherence_high.item() - one.coherence_low.item()) / 2
        cells["coherence"] += f" +- {half:.1g}" if half > 0 else ""
        rows.append((str(name), f"{one.rows.item()} x {one.columns.item()}", *cells.values()))
    return render_table(head, rows)


def _series(found: xr.Dataset, figure: str) -> str:
    """Return a table of one figure along the series: some checkpoints, evenly chosen, the first and last among them."""
    import numpy as np

    count = found.sizes["checkpoint"]
    places = np.unique(np.linspace(0, count - 1, min(count, SHOWN)).round().astype(int))
    known = ~np.isnan(found[figure].values).all(axis=0)
    measured, levels = found[figure].isel(matrix=known), found[f"{figure}_random"].values[-1, known]
    steps = [Path(str(found.checkpoint.values[place])).name for place in places]
    rows = [
        (str(one.matrix.item()), *(number(value) for value in (*one.values[places], random)))
        for one, random in zip(measured.transpose("matrix", "checkpoint"), levels, strict=True)
    ]
    some = f", {len(places)} of {count} checkpoints" if len(places) < count else ""
    return f"{found[figure].attrs['long_name']}{some}\n{render_table(('matrix', *steps, '(random)'), rows)}"


def _circuits(found: xr.Dataset) -> str:
    """Return a table of the stable ranks of the circuits by layer: median, smallest and largest head."""
    rows = []
    for layer in found.layer.values:
        cells = [str(layer)]
        for circuit in ("query-key", "output-value"):
            ranks = found.head_stable_rank.sel(layer=layer, head_matrix=circuit).dropna("head")
            random = found.head_stable_rank_random.sel(layer=layer, head_matrix=circuit).item()
            low, middle, high = ranks.quantile([0, 0.5, 1]).values if ranks.size else (float("nan"),) * 3
            cells += [f"{number(middle)} ({number(low)} to {number(high)})", number(random)]
        rows.append(cells)
    head = ("layer", "query-key", "(random)", "output-value", "(random)")
    return f"stable rank of the circuits of heads: median (smallest to largest)\n{render_table(head, rows)}"


def number(value: float) -> str:
    """Return a figure with four digits, a dash for NaN."""
    return "-" if value != value else f"{value:.4g}"

"""The weights of an open checkpoint: one row each, with its role; and the same as a table for people."""

import math
from dataclasses import dataclass

from manyheads.models import refusals
from manyheads.models.families import Family, recognise
from manyheads.models.folder import Checkpoint
from manyheads.models.tables import Role


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a checkpoint.

    Attributes
    ----------
    name, shape, dtype
        As stored.
    role, kind, layer, layout
        What it means, see `Part`.
    tied_to
        The weight that it shares its values with, None when it stands for itself.
    """

    name: str
    role: Role
    kind: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: str
    layout: str
    tied_to: str | None = None


def fit_family(checkpoint: Checkpoint) -> Family:
    """Recognise the family of an open checkpoint from its configuration and its names.

    Raises
    ------
    ConfigMissing
        The checkpoint has no configuration.
    CheckpointRefused
        See `recognise`.
    """
    if checkpoint.config is None:
        raise refusals.ConfigMissing(checkpoint.path, "no config.json beside the weights")
    return recognise(checkpoint.config, [*checkpoint.names, *checkpoint.aliases], checkpoint.path)


def roles(checkpoint: Checkpoint) -> tuple[Weight, ...]:
    """State the role of every weight of a checkpoint.

    Returns
    -------
    tuple[Weight, ...]
        One for each stored tensor in the order of the files, then one for each alias that a file's metadata names.
        Tied weights that are stored twice are compared (by sha256) and carry `tied_to`.

    Raises
    ------
    TieBroken
        The configuration ties two weights that are stored with different values.
    CheckpointRefused
        The family is unknown or does not explain every name, see `recognise`.
    """
    family = fit_family(checkpoint)
    weights = []
    for name in (*checkpoint.names, *checkpoint.aliases):
        part, entry = family.parts[name], checkpoint.entry(name)
        tied_to = checkpoint.aliases.get(name)
        if tied_to is None and name in family.tied:
            tied_to = family.tied[name]
            other = checkpoint.entry(tied_to)
            same_kind = (entry.dtype, entry.shape) == (other.dtype, other.shape)
            if not same_kind or checkpoint.fingerprint(name) != checkpoint.fingerprint(tied_to):
                raise refusals.TieBroken(
                    checkpoint.path, f"{name} and {tied_to} are tied by the configuration and differ", name
                )
        weights.append(Weight(name, part.role, part.kind, part.layer, entry.shape, entry.dtype, part.layout, tied_to))
    return tuple(weights)


def tabulate(checkpoint: Checkpoint) -> str:
    """Lay out the weights of a checkpoint by role, as a table for a terminal.

    Returns
    -------
    str
        A line for each role, kind and shape: how many tensors there are, and how many numbers they hold together.
    """
    rows: dict[tuple[str, str, str], list[int]] = {}
    for weight in roles(checkpoint):
        shape = " x ".join(map(str, weight.shape)) or "scalar"
        counts = rows.setdefault((weight.role.value, weight.kind, shape), [0, 0])
        counts[0] += 1
        counts[1] += 0 if weight.tied_to else math.prod(weight.shape)
    cells = [("role", "kind", "shape", "tensors", "numbers")]
    cells += [(*key, f"{tensors:,}", f"{numbers:,}") for key, (tensors, numbers) in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([*map(str.ljust, row[:3], widths), *map(str.rjust, row[3:], widths[3:])]).rstrip() for row in cells
    ]
    return "\n".join(lines)

"""Comparison of datasets bit by bit, measured times and attributes included."""

from manyheads.study.store.equality import _same


def unequal_bits(first, second):
    """Return the names of all variables that differ in anything, measured times and attributes included."""
    names = sorted(str(name) for name in {*first.variables, *second.variables})
    ours, theirs = dict(first.variables), dict(second.variables)
    found = [name for name in names if not _same(ours.get(name), theirs.get(name))]
    found += [name for name in names if name not in found and ours[name].attrs != theirs[name].attrs]
    coordinates = set(first.coords) ^ set(second.coords)
    return found + sorted(map(str, coordinates)) + ([] if first.attrs == second.attrs else ["attributes"])

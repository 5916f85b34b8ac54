"""Order and steps of checkpoints from the numbers in their names."""

import itertools
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from manyheads.errors import UsageError
from manyheads.models.checkpoints.checkpoint import Checkpoint, open_checkpoint

Source: TypeAlias = Checkpoint | Path | str

PARTS = ("stage", "phase", "epoch")  # from the longest: within each the others may start anew
STEPS = ("step", "checkpoint", "ckpt", "iteration", "iter", "update", "batch")
COUNTERS = (*STEPS, "token", "sample", "example")
MEASURED = (  # say nothing of order
    *("loss", "acc", "accuracy", "ppl", "perplexity", "score", "metric", "bpb", "bleu"),
    *("lr", "rate", "wd"),
)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
FIELD = re.compile(r"([a-z]*)[-_=]*(\d{1,3}(?:,\d{3})+(?!\d)|\d+(?:\.\d+)?(?:e\d+(?![a-z0-9]))?)([kmbt](?![a-z0-9]))?")
WORD_BEHIND = re.compile(r"[-_ ]*([a-z]+)(?![a-z]|[-_=]*\d)")  # 100_steps, 1b-tokens


class Order(NamedTuple):
    """Order of checkpoints by their names."""

    sources: list[Source]  # sorted, or as given where names hold no step or do not tell the order
    # The step of each; where steps start anew, as in a second stage, 0, 1, ...; None if a name holds none
    steps: list[int] | None
    # Two checkpoints of which the names do not say which is later, and why not; None if they tell
    conflict: tuple[Source, Source, str] | None


def path_of(source: Source) -> Path:
    """Return the path of a checkpoint, opened or not."""
    if not isinstance(source, (Checkpoint, Path, str)):
        raise UsageError(f"a checkpoint of type {type(source).__name__}: expected a path or an opened checkpoint")
    return source.path if isinstance(source, Checkpoint) else Path(source)


def list_sources(given: Source | Sequence[Source]) -> list[Source]:
    """Return checkpoints as a list, one of them as a list of one."""
    return [given] if isinstance(given, Checkpoint | Path | str) or not isinstance(given, Iterable) else list(given)


def as_checkpoint(source: Source, follow_links: bool = False) -> Checkpoint:
    """Return a checkpoint, opened if it is not."""
    return source if isinstance(source, Checkpoint) else open_checkpoint(source, follow_links=follow_links)


def step_of(source: Source) -> int | None:
    """Return the training step in the name of a checkpoint's folder or file, or in that of the folder around a file.

    Examples
    --------
    >>> step_of("run/checkpoint-500"), step_of("run/step1000/model.safetensors"), step_of("7"), step_of("pythia-70m")
    (500, 1000, 7, None)
    """
    path = path_of(source)
    parts = (path.name, path.parent.name) if path.suffix in (".safetensors", ".json") else (path.name,)
    found = (_step(_fields([part]), STEPS) for part in parts)
    return next((step for step in found if step is not None), None)


def sort_by_step(sources: Sequence[Source]) -> list[Source]:
    """Sort checkpoints by their names; UsageError if the order is ambiguous."""
    order = read_order(sources)
    if order.conflict is not None:
        *pair, why = order.conflict
        raise UsageError(
            f"the names of {' and '.join(str(path_of(each)) for each in pair)} do not say which is later: {why}; "
            "give the checkpoints of one run"
        )
    return order.sources


def read_order(sources: Sequence[Source]) -> Order:
    """Sort checkpoints by all numbers in their paths, from where these differ on."""
    paths = [Path(os.path.abspath(path_of(source))) for source in sources]
    shared = len(Path(os.path.commonpath(path.parent for path in paths)).parts) if paths else 0
    fields = [_fields(path.parts[shared:]) for path in paths]
    words = [_words(path.parts[shared:]) for path in paths]
    if any(_step(each) is None for each in fields):
        return Order(list(sources), None, None)
    places = sorted(range(len(paths)), key=lambda place: _key(fields[place]))
    for one, other in itertools.pairwise(places):
        alike = all(fields[one].get(part) == fields[other].get(part) for part in PARTS)
        if why := _conflict(fields[one], fields[other]) or (
            _differing_words(words[one], words[other]) if alike else ""
        ):
            return Order(list(sources), None, (sources[one], sources[other], why))
    steps, keys = [_step(fields[place]) or 0 for place in places], [_key(fields[place]) for place in places]
    if len(set(steps)) < len(set(map(tuple, keys))) or steps != sorted(steps):
        steps = [keys.index(key) for key in keys]  # the same for a checkpoint that occurs twice
    return Order([sources[place] for place in places], steps, None)


def _fields(parts: Sequence[str]) -> dict[str, float]:
    """Return the numbers of names of folders and files, by the words before them."""
    found: dict[str, float] = {}
    for place, part in enumerate(parts):
        name = DATE.sub("", part.lower())
        fields = [("step", name, "")] if name.isdecimal() else [_field(name, match) for match in FIELD.finditer(name)]
        for label, number, unit in fields:
            if not label and place < len(parts) - 1:
                continue  # dates of folders
            singular = (label, label.removesuffix("s"), label.removesuffix("es"))
            label = next((word for word in (*PARTS, *COUNTERS) if any(map(str.endswith, singular, [word] * 3))), label)
            value = float(number.replace(",", "")) * UNITS[unit]
            if value == math.inf:
                continue
            while found.get(label, value) != value:
                label += "'"  # a second number of the word
            found[label] = value
    return found


def _field(name: str, match: re.Match[str]) -> tuple[str, str, str]:
    """Return the word of a number, before it or, where there is none, behind it, the number and its unit."""
    label, number, unit = match[1], match[2], match[3] or ""
    behind = WORD_BEHIND.match(name, match.end())
    known = {f"{word}{ending}" for word in (*PARTS, *COUNTERS) for ending in ("", "s", "es")}
    return (behind[1] if not label and behind and behind[1] in known else label), number, unit


def _words(parts: Sequence[str]) -> list[str]:
    """Return the words of names, those of folders with a slash, without numbers, dates and the suffix of a file."""
    found = []
    for place, part in enumerate(parts):
        text = FIELD.sub(lambda match: f"{match[1]} ", DATE.sub(" ", part.lower().removesuffix(".safetensors")))
        found += [f"{word}/" if place < len(parts) - 1 else word for word in re.findall(r"[a-z]+", text)]
    return found


def _differing_words(one: list[str], other: list[str]) -> str:
    """Describe the words in which two names differ, such as those of stages without a number; empty if there are none.

    A folder around only one of them is ignored.
    """
    mine, its = ([word for word in each if word not in rest] for each, rest in ((one, other), (other, one)))
    if mine and its:
        return f"one is of {mine[0].rstrip('/')!r}, the other of {its[0].rstrip('/')!r}"
    alone = [word for word in mine or its if "/" not in word]
    return f"{alone[0]!r} is in one name alone" if alone else ""


def _step(fields: dict[str, float], labels: Sequence[str] = (*COUNTERS, *PARTS[::-1])) -> int | None:
    return next((int(fields[label]) for label in labels if label in fields), None)


def _key(fields: dict[str, float]) -> list[float]:
    return [fields.get(label, -1.0) for label in (*PARTS, *COUNTERS)]


def _conflict(one: dict[str, float], other: dict[str, float]) -> str:
    """Return the reason why two names leave the order of their checkpoints open; empty if they determine it."""
    known = {*PARTS, *COUNTERS}
    for label in sorted((one.keys() & other.keys()) - known):
        if one[label] != other[label] and not label.rstrip("'").endswith(MEASURED):
            return f"they are of {label.rstrip(chr(39)) or 'number'} {one[label]:g} and {other[label]:g}"
    for label in PARTS:
        if (label in one) != (label in other):
            return f"one names a {label}, the other does not"
        if one.get(label) != other.get(label):
            return ""
    missing = sorted((one.keys() ^ other.keys()) - set(MEASURED))
    if missing:
        return f"one names a {missing[0] or 'number'}, the other does not"
    larger = {label: other[label] - one[label] for label in COUNTERS if label in one}
    up, down = ([label for label, change in larger.items() if sign * change > 0] for sign in (1, -1))
    return f"one has the larger {up[0]}, the other the larger {down[0]}" if up and down else ""

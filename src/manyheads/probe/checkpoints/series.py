"""Steps of checkpoints: read from their names, and their order."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from manyheads.models.checkpoint import Checkpoint

Source: TypeAlias = Checkpoint | Path | str


def path_of(source: Source) -> Path:
    """Return the path of a checkpoint, opened or not."""
    return source.path if isinstance(source, Checkpoint) else Path(source)


def step_of(source: Source) -> int | None:
    """Return the step in the name of a checkpoint's folder or file, or in that of the folder around a file.

    Examples
    --------
    >>> step_of("run/checkpoint-500"), step_of("run/step1000/model.safetensors"), step_of("7"), step_of("pythia-70m")
    (500, 1000, 7, None)
    """
    path = path_of(source)
    in_file = path.suffix in (".safetensors", ".json")
    for part in (path.name, path.parent.name)[: 1 + in_file]:
        found = re.search(r"(?:step|checkpoint|ckpt|iter|epoch)[-_]?(\d+)|^(\d+)$", part)
        if found:
            return int(found[1] or found[2])
    return None


def sort_by_step(sources: Sequence[Source]) -> list[Source]:
    """Sort checkpoints by the steps in their names; leave them as they are unless every name holds one."""
    steps = [step_of(source) for source in sources]
    if any(step is None for step in steps):
        return list(sources)
    return [sources[place] for place in sorted(range(len(steps)), key=lambda place: steps[place] or 0)]

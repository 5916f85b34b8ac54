"""Trackers: where scalars of a training are sent beside the store, such as TensorBoard, W&B, trackio or MLflow.

A tracker is any function that takes the rows of one measured step.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Row(NamedTuple):
    """One figure of one step."""

    step: int  # optimizer updates so far
    layer: int | None  # as in `record.dataset()`; None if the figure belongs to no single one
    head: int | None
    name: str  # of the figure, such as "entropy"; for a matrix with its name, such as "update_ratio/h.0.attn.c_proj"
    value: float
    se: float | None  # its standard error from the sampling of rows; None if exact or not known
    level: float | None  # its null level; None if there is none


# Called with all rows of a measured step.
Tracker = Callable[[Sequence[Row]], Any]


def scalars(rows: Iterable[Row], heads: bool = False) -> dict[str, float]:
    """Return scalars by tag: figures of layers, means over their heads, and null levels.

    With `heads` for every head as well. The largest logit of a layer is that of all its heads.

    Examples
    --------
    >>> rows = [Row(0, 3, head, "entropy", value, None, 4.6) for head, value in enumerate((1.0, 2.0))]
    >>> scalars(rows)
    {'entropy/layer_3': 1.5, 'entropy_null/layer_3': 4.6}
    """
    found: dict[str, float] = {}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        tag = row.name if row.layer is None else f"{row.name}/layer_{row.layer}"
        groups.setdefault(tag, []).append(row)
        if heads and row.head is not None:
            found[f"{tag}/head_{row.head}"] = row.value
    for tag, group in groups.items():
        pooled = np.max if group[0].name == "max_logit" else np.mean
        found[tag] = float(pooled([row.value for row in group]))
        if group[0].level is not None:
            name, *rest = tag.split("/")
            found["/".join([f"{name}_null", *rest])] = group[0].level
    return found


def tensorboard_tracker(writer: Any, heads: bool = False) -> Tracker:
    """Send scalars, with `heads` of every head too, to a `SummaryWriter`, or to its `add_scalar(tag, value, step)`."""
    return lambda rows: [writer.add_scalar(tag, value, rows[0].step) for tag, value in _tags(rows, heads).items()]


def wandb_tracker(run: Any, heads: bool = False, step_name: str = "train/global_step") -> Tracker:
    """Send scalars to a run of W&B, the module `trackio`, or any object with `log(scalars)`.

    The scalar `step_name` holds the step, as the Hugging Face Trainer logs it. The services' own step is left alone,
    because they refuse one that is smaller than the last.
    """
    return lambda rows: run.log({**_tags(rows, heads), step_name: rows[0].step})


def mlflow_tracker(client: Any, heads: bool = False) -> Tracker:
    """Send scalars to the module `mlflow` with an active run, or any object with `log_metrics(scalars, step=step)`."""
    return lambda rows: client.log_metrics(_tags(rows, heads), step=rows[0].step)


def _tags(rows: Sequence[Row], heads: bool) -> dict[str, float]:
    return {f"probe/{tag}": value for tag, value in scalars(rows, heads).items()}

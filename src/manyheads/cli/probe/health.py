"""`manyheads probe health`: alarms and dormant heads of a recorded training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Union

import tyro

from manyheads._extras import xarray as xr
from manyheads._overview import printable
from manyheads.cli.parsing import OptionalInt, Switch
from manyheads.errors import UsageError


@dataclass(frozen=True)
class Health:
    """Look for alarms and dormant heads in the recording of a training.

    RECORDING is the store of `manyheads probe attention`, or the folder that `AttentionRecorder` was given as store=,
    with figures of a fixed batch for alarms; updates that `UpdateRecorder` wrote there are judged too. Each detector is
    named, with its false-alarm rate; no alarm says anything about the final loss.
    """

    recording: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECORDING", help_behavior_hint="")]
    """Folder of a recording."""
    clean: Annotated[Union[None, tuple[Path, ...]], tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")] = None
    """Recordings of clean trainings by the same recipe, at least 4, with which it is compared."""
    probes: OptionalInt = None  # Planned number of probes; those that are there if absent.
    false_alarm: float = 0.05  # Chance of an alarm of the detector of changes in a clean training.
    max_logit: float = 50.0  # Largest logit that is no alarm.
    silent: int = 48  # Probes at the start without alarms of the detector of changes: at least those of the warm-up.
    json: Switch = False  # Print JSON instead of sentences.
    strict: Switch = False  # Exit with 1 if there is an alarm.

    def run(self) -> int:
        """Judge and print; return the exit status."""
        from dataclasses import asdict

        from manyheads.probe import find_alarms
        from manyheads.probe.heads.dormant import dormant_heads

        curves, updates = _fixed_batch(self.recording)
        options = {name: getattr(self, name) for name in ("probes", "false_alarm", "max_logit", "silent")}
        clean = [_fixed_batch(path)[0] for path in self.clean or ()]
        alarms = find_alarms(curves, updates=updates, clean=clean, **options)
        last = curves.isel(step=-1)
        dormant = dormant_heads(last) if "relative_output" in last else []
        if self.json:
            print(json.dumps({"alarms": [asdict(alarm) for alarm in alarms], "dormant": dormant}, indent=1))
        else:
            probes = f"{curves.sizes['step']} probes, {curves.sizes['layer']} layers"
            few = "" if curves.sizes["step"] > self.silent else f"; changes are judged from probe {self.silent + 1} on"
            print(f"{probes}: {len(alarms) or 'no'} alarm{'s' * (len(alarms) != 1)}{few}")
            lines = [str(alarm) for alarm in alarms]
            if dormant:
                lines.append(f"dormant at step {last.step.item()}: {'; '.join(dormant)}")
            for line in lines:
                print(printable(line))
        return 1 if self.strict and alarms else 0


def _fixed_batch(path: Path) -> tuple[xr.Dataset, xr.Dataset | None]:
    """Return the figures of a fixed batch, with the query-key circuits of the same heads, and the recorded updates.

    Circuits are left out, and updates are None, if they were not recorded.
    """
    import numpy as np

    from manyheads.probe.live.reading import open_recording

    tree = open_recording(path)
    if "attention_fixed" not in tree.children:
        why = "those of the training's own batches move with the batches"
        remedy = "record with AttentionRecorder(model, batch={...}, store=...)"
        raise UsageError(f"{path} holds no figures of a fixed batch: {why}, so {remedy}")
    curves = tree["attention_fixed"].to_dataset()
    updates = tree["updates"].to_dataset() if "updates" in tree.children else None
    weights = tree["weights"].to_dataset() if "weights" in tree.children else curves
    if "head_stable_rank" not in weights:
        return curves, updates
    circuits = weights.sel(head_matrix="query-key")[["head_stable_rank", "head_frobenius"]]
    same = all(np.array_equal(circuits[name], curves[name]) for name in ("step", "layer", "head"))
    both = {"stable_rank": circuits.head_stable_rank, "frobenius": circuits.head_frobenius} if same else {}
    return curves.assign(both), updates

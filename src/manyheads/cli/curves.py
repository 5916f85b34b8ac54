"""`manyheads curves judge`: what the curves of anybody's trainings say of drop, rebound and loss."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Union

import tyro

from manyheads._overview import plain_text, printable, render_table
from manyheads.cli.parsing import OptionalPath, Switch
from manyheads.errors import UsageError

if TYPE_CHECKING:
    from manyheads.curves.curve_files import RunCurves

Paths = Union[None, tuple[Path, ...]]


@dataclass(frozen=True)
class Judge:
    """Judge curves of attention entropy and stable rank: drop and rebound by layer, and their relation to the loss.

    RUN is the curves of one training: a .csv file with columns step, layer, entropy or stable_rank and perhaps loss,
    learning_rate, uniform_entropy, random_stable_rank; an .npz file with arrays of these names; or the store of
    `manyheads probe attention`. A .pt file holds many runs: a list of dictionaries with keys, this_entropies,
    this_val_loss and lr, as JoMA's authors publish. Shapes take 20 steps, the relation to the loss takes 8 runs.
    """

    runs: Annotated[Paths, tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")] = None
    """Curves, one file or folder for each training."""
    losses: Annotated[Paths, tyro.conf.arg(metavar="FILE ...", help_behavior_hint="")] = None
    """Losses of the runs in their order: trainer_state.json of the Hugging Face Trainer, or CSV with step and loss."""
    plot: OptionalPath = None  # File for the picture (.svg, .png, .pdf).
    json: Switch = False  # Print JSON instead of a table.

    def run(self) -> int:
        """Judge and print; return the exit status.

        Raises
        ------
        UsageError
            No run, another number of losses than of runs, or curves that do not fit together.
        FileRefused
            A file that holds no curves or no losses.
        """
        from manyheads.curves.judge import judge_curves

        found = judge_curves(self._read())
        if self.plot is not None:
            found.plot().savefig(self.plot)
        if self.json:
            layers = [asdict(each) | {"shape": each.shape and each.shape._asdict()} for each in found.layers]
            relations = [asdict(each) for each in found.relations]
            print(json.dumps({"layers": layers, "relations": relations, "sentences": found.sentences()}, indent=1))
            return 0
        overview = found._overview()
        table = render_table(overview.columns, [tuple(map(plain_text, row)) for row in overview.rows])
        print(*map(printable, (*table.splitlines(), "", *found.sentences())), sep="\n")
        return 0

    def _read(self) -> list[RunCurves]:
        from dataclasses import replace

        from manyheads.curves.curve_files import read_runs, with_losses
        from manyheads.probe.reports.shapes import curves_of

        if not self.runs:
            raise UsageError("no run: give files of curves, or stores of manyheads probe attention")
        given = [(path, [curves_of(path)] if path.is_dir() else read_runs(path)) for path in self.runs]
        read = [run for _, runs in given for run in runs]
        if self.losses is not None and len(self.losses) != len(read):
            raise UsageError(f"--losses: {len(self.losses)} files for {len(read)} runs; give one for each, in order")
        if len({run.name for run in read}) < len(read):
            read = [replace(run, name=f"{path}{run.name[len(path.stem) :]}") for path, runs in given for run in runs]
        return [with_losses(run, path) for run, path in zip(read, self.losses, strict=True)] if self.losses else read

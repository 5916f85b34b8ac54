"""`manyheads scale preflight`: train the user's own model at several shapes and say what grows and what transfers."""

import json
from dataclasses import dataclass, replace
from functools import wraps
from typing import Annotated, Any, Literal, Union

import tyro

from manyheads.cli.parsing import OptionalPath, Switch, Target, load_function
from manyheads.cli.scale.base_shape import Grid, Numbers, TunedBase, read_shape
from manyheads.errors import UsageError

Axes = Annotated[
    Union[None, tuple[Literal["key_dim", "heads", "depth", "stream", "batch", "steps"], ...]],
    tyro.conf.arg(metavar="AXIS ...", help_behavior_hint=""),
]


@dataclass(frozen=True)
class Preflight(TunedBase):
    """Train your own model at several shapes for a few steps: which updates grow, what is forgotten, what transfers.

    TARGET is a function of (shape, seed) that returns (model, optimizer, batches), built as you would train at that
    shape; then, where needed, loss(model, batch) and roles from patterns of parameter names. shape has key_dim, heads,
    depth and width. The model is a module of PyTorch, or a tree of JAX arrays with an optax optimizer. A model of
    Hugging Face transformers, one whose parameters have known names (see scale audit), or one with roles, is judged by
    the parametrization, another one measured. The function is imported and called: name only code that you trust.
    """

    target: Target = ""  # package.module:function.
    axes: Axes = None
    """Axes along which the model grows, key_dim, heads and depth if absent; along batch and steps the exponent of the
    best learning rate is measured, with its interval."""
    sizes: Numbers = None  # Sizes on one axis; once, twice and four times the base's if absent.
    steps: int = 8  # Steps of a training whose updates are measured.
    seeds: int = 4  # Trainings of each shape.
    seed: int = 0  # First seed.
    transfer: Switch = False  # Search the best learning rate at each size as well.
    rate_factors: Grid = None  # Grid of the search, factors of your own learning rates; 0.125 8 7 if absent.
    train: int = 32  # Steps of a training of the search; along batch and steps, of the shortest.
    limit: float = 1800.0  # CPU seconds that the estimate may reach; beyond, nothing is trained.
    out: OptionalPath = None  # Folder for the picture (SVG) and the figures (preflight.json).
    json: Switch = False  # Print JSON instead of sentences.
    strict: Switch = False  # Exit with 1 if something is wrong.

    def run(self) -> int:
        """Train, print, and return the exit status."""
        import numpy as np

        from manyheads.scaling import preflight
        from manyheads.scaling.preflight_checks.training import Training
        from manyheads.study.execution.progress import announce
        from manyheads.study.store.disk import write_text

        if ":" not in self.target:
            wanted = "package.module:function of (shape, seed) that returns (model, optimizer, batches)"
            raise UsageError(f"TARGET {self.target!r}: expected {wanted}")
        base, _ = read_shape(self.base, "--base", is_file=False)
        axes = self.axes or ("key_dim", "heads", "depth")
        if self.sizes and len(axes) != 1:
            raise UsageError(f"--sizes with {len(axes)} axes: give one with --axes")
        if self.rate_factors and not (self.transfer or set(axes) <= {"batch", "steps"}):
            raise UsageError("--rate-factors is for --transfer, or for batch and steps alone: add it")
        low, high, count = self.rate_factors or (0.125, 8.0, 7)
        if not 0 < low < high < np.inf or count < 3:
            given = f"--rate-factors {low:g} {high:g} {count}"
            raise UsageError(f"{given}: give two factors, the lower first, and 3 points")
        same: dict[str, Any] = {name: getattr(self, name) for name in ("steps", "train", "limit")}
        function = load_function(self.target)

        @wraps(function)
        def make(*given: Any, **steps: Any) -> Training:
            training = Training.of(function(*given, **steps), self.target)
            return replace(training, roles=self.roles_beside(training.roles))

        found = preflight(
            make if self.roles else function,
            base,
            axes={axes[0]: self.sizes} if self.sizes else axes,
            parametrization=self.parametrization(base),
            hyperparameters=None if self.learning_rate is None else self.hyperparameters(),
            seeds=range(self.seed, self.seed + self.seeds),
            rate_factors=np.geomspace(low, high, count).tolist() if self.transfer or self.rate_factors else (),
            announce=lambda text: announce(text, True),
            **same,
        )
        figures = json.dumps(found.as_dict(), indent=1)
        print(figures if self.json else found)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            write_text(self.out / "preflight.json", figures + "\n")
            if found.growths or found.transfers:  # else no search was decided
                found.plot().savefig(self.out / "preflight.svg")
            announce(f"picture and figures in {self.out}", True)
        return 1 if self.strict and not found.passed else 0

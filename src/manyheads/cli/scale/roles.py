"""`manyheads scale roles`: the roles of a model's parameters, inferred from its builder, and --model of other verbs."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyheads.cli.parsing import OptionalPath, Switch, Target, load_function
from manyheads.cli.scale.base_shape import Sizes, read_shape

if TYPE_CHECKING:
    from manyheads.models.infer.inferred import InferredRoles


@dataclass(frozen=True)
class Roles:
    """Infer the role of every parameter of a PyTorch model from one traced forward pass; no name is read.

    TARGET is a function build(shape) that returns the model at a shape, or the build(shape, seed) of scale preflight.
    It is called at the base and at twice its N, H and L. The forward pass runs on two sequences of token ids, or on the
    arguments that a function `example(model)` of the same module returns. Whatever has no derived role is refused. The
    function is imported and called: name only code that you trust.
    """

    target: Target = ""  # package.module:build.
    base: Sizes = None  # Tuned shape: key dimension N, heads H, depth L.
    json: Switch = False  # Print JSON instead of a table.
    write: OptionalPath = None
    """File for the map from parameters to parts, which --roles reads: JSON, or TOML (*.toml)."""

    def run(self) -> int:
        """Infer and print; return the exit status."""
        from manyheads.study.store.disk import write_text

        found = infer(self.target, read_shape(self.base, "--base", is_file=False)[0])
        print(json.dumps(found.as_dict(), indent=1) if self.json else found)
        if self.write is not None:
            lines = "".join(f'"{name}" = "{part}"\n' for name, part in found.roles.items())
            toml = str(self.write).endswith(".toml")
            write_text(self.write, lines if toml else json.dumps(dict(found.roles), indent=1) + "\n")
        return 0


def infer(target: str, base: Any) -> "InferredRoles":
    """Infer the roles of the model that package.module:build makes."""
    import sys

    from manyheads.errors import UsageError
    from manyheads.scaling import infer_roles

    module, _, path = target.partition(":")
    if not path:
        raise UsageError(f"{target!r}: expected package.module:build, a function build(shape) that returns a model")
    build = load_function(target)
    return infer_roles(build, base, getattr(sys.modules[module], "example", None))


def print_parameters(target: str, p: Any, shape: Any, tuned: Any, as_json: bool) -> None:
    """Print the settings of every parameter of a model at a shape, those of repeated layers once."""
    from dataclasses import replace

    from manyheads._overview import plain_text, render_table
    from manyheads.models.infer.inferred import build_model
    from manyheads.models.infer.roles import join_layers
    from manyheads.models.torch.model import ModelOptions
    from manyheads.scaling.torch.applied_factors import model_targets

    found, build = infer(target, p.base), load_function(target)
    options = ModelOptions(roles=found)
    _, forward, targets, _ = model_targets(replace(p, base=found.shape), build_model(build, shape), tuned, options)
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in targets:
        names = {"parameter": join_layers(each.parameter.name), "part": "+".join(each.parameter.parts)}
        numbers = {name: getattr(each, name) for name in ("learning_rate", "epsilon", "weight_decay")}
        row: dict[str, Any] = {**names, "init": each.factors.initial, **numbers, "optimizer": each.factors.rule}
        rows.setdefault(tuple(names.values()), row)
    if as_json:
        print(json.dumps({"shape": str(shape), "forward": vars(forward), "parameters": list(rows.values())}, indent=1))
        return
    columns = ("parameter", "part", "init std ×", "learning rate", "epsilon", "weight decay", "optimizer")
    print(render_table(columns, [tuple(map(plain_text, row.values())) for row in rows.values()]))
    applied = ", ".join(f"{name} × {number:.4g}" for name, number in vars(forward).items())
    print(f"\nthe forward pass multiplies, relative to the base: {applied}")

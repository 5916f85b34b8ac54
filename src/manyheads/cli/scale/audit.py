"""`manyheads scale audit`: check the hyperparameters and the initialization of every parameter of a PyTorch model."""

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Optional

import tyro

from manyheads.cli.parsing import Builder, OptionalInt, Switch, Target, load_function
from manyheads.cli.scale.base_shape import Sizes, TunedBase, read_base, read_shape
from manyheads.errors import UsageError, check_call


@dataclass(frozen=True)
class Audit(TunedBase):
    """Check learning rate, epsilon, weight decay and init of every parameter of a PyTorch model.

    TARGET is a function without arguments that returns (model, optimizer). Roles and shape are read off a model of
    Hugging Face transformers, and off any other whose parameters have the names of one, or of nanoGPT, torchtitan,
    litgpt or nanochat; for the rest --roles names a file, or the function returns (model, optimizer, roles). A
    learning-rate schedule may take the place of the optimizer. Multipliers in the forward pass are measured on two
    sequences of token ids, or on the batch of (model, optimizer, roles, example), a tuple or a mapping of arguments.
    The function is imported and called: name only code that you trust.
    """

    target: Target = ""  # package.module:function.
    base_config: Annotated[Optional[str], tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """A config.json, or a folder with one, instead of --base."""
    to: Sizes = None  # Shape of a model whose parameters do not tell it.
    heads: OptionalInt = None  # Number of heads, where no module states it.
    model: Builder = None  # Function build(shape) of package.module: infer the roles from it.
    applied: Switch = False
    """The forward pass multiplies logits, branches and outputs; otherwise the factors are folded into weights."""
    trained: Switch = False  # The weights are trained or loaded: do not check their initialization.
    json: Switch = False  # Print JSON instead of sentences.
    strict: Switch = False  # Exit with 1 if a parameter is wrong.

    def run(self) -> int:
        """Audit and print; return the exit status."""
        from manyheads.scaling import audit_model

        if ":" not in self.target:
            wanted = "package.module:function that returns (model, optimizer)"
            raise UsageError(f"TARGET {self.target!r}: expected {wanted}")
        hyperparameters = self.hyperparameters()
        base, notes = read_base(self.base, self.base_config)
        for note in notes.assumed if notes else ():
            print(f"base: {note}", file=sys.stderr)
        shape = read_shape(self.to, "--to", is_file=False)[0] if self.to else None
        model, optimizer, roles, example = self._load()
        roles = self.roles_beside(roles)
        if self.model:
            from manyheads.cli.scale.roles import infer

            if roles is not None or self.applied:
                other = "--applied is" if roles is None else "roles are"
                raise UsageError(f"--model {self.model}, and {other} given as well: leave one of them out")
            roles = infer(self.model, base)
            base = roles.shape
        fresh = False if self.trained else None
        options: dict[str, Any] = {"folded": not self.applied, "fresh": fresh, "example": example, "heads": self.heads}
        given = (model, optimizer, hyperparameters, roles, shape)
        found = audit_model(self.parametrization(base), *given, **options)
        print(json.dumps(found.as_dict(), indent=1) if self.json else found)
        return 1 if self.strict and not found.passed else 0

    def _load(self) -> tuple[Any, ...]:
        function = load_function(self.target)
        returns = " that returns (model, optimizer); scale preflight takes one of (shape, seed)"
        check_call(self.target, function, returns=returns)
        made = function()
        if not isinstance(made, tuple) or not 2 <= len(made) <= 4:
            raise UsageError(
                f"{self.target} returned {type(made).__name__}: expected (model, optimizer), or (model, optimizer, "
                "roles) with roles from patterns of names to parts, or (model, optimizer, roles, example)"
            )
        return (*made, None, None)[:4]

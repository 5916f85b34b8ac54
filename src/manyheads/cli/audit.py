"""`manyheads scale audit`: does every parameter of a model have the rate, epsilon, decay and start that it needs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional, Union

import tyro

from manyheads.cli.parsing import ABSENT, load_function
from manyheads.cli.scale import Sizes, Theory, read_shape


@dataclass(frozen=True)
class Audit(Theory):
    """Hold every parameter's learning rate, epsilon, weight decay and init against what its shape needs (PyTorch).

    The target is a function that takes nothing and returns (model, optimizer), or (model, optimizer, roles) for a model
    that is not of Hugging Face transformers; --to then gives its shape. A schedule may stand for its optimizer. What
    the model multiplies itself is measured on two sequences of token ids; (model, optimizer, roles, example) gives it
    another batch, a tuple or a mapping of arguments.
    The function is imported and called, and so runs its code: name only code that you trust.
    """

    target: Annotated[str, tyro.conf.Positional] = ""
    """package.module:function."""
    base_config: Annotated[Optional[str], tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """In place of --base: a config.json, or a folder with one."""
    to: Sizes = None
    """The model's shape, where it has no configuration that tells."""
    learning_rate: Annotated[Optional[float], ABSENT] = None
    """The learning rate that was tuned at the base."""
    epsilon: float = 1e-8
    """Adam's epsilon at the base."""
    weight_decay: float = 0.0
    """Decoupled weight decay at the base."""
    no_decay: Annotated[Union[None, tuple[str, ...]], tyro.conf.arg(metavar="ROLE ...", help_behavior_hint="")] = None
    """Roles without weight decay, such as norm bias; or parts of one: embedding_bias, the bias of a ViT's patches."""
    stds: Annotated[Optional[Path], ABSENT] = None
    """A JSON file with the init's standard deviation at the base by role; a known family's usual ones if absent."""
    applied: bool = False
    """The model multiplies its logits, branches and outputs itself; otherwise the weights carry those factors."""
    trained: bool = False
    """The weights have been trained, or were loaded: say nothing about how they start."""
    json: bool = False
    """Print JSON instead of sentences."""
    strict: bool = False
    """Exit with 1 when something is wrong."""

    def run(self) -> int:
        """Audit and print; return the exit status.

        Raises
        ------
        UsageError
            A target that does not return a model and its optimizer, or whatever cannot be read off them.
        """
        from manyheads.errors import UsageError
        from manyheads.limits import BaseHyperparameters, audit_model

        if ":" not in self.target:
            raise UsageError(
                f"{self.target!r} names no function: give package.module:function that returns (model, optimizer)"
            )
        if self.learning_rate is None:
            raise UsageError("--learning-rate is missing: give the learning rate that was tuned at the base")
        if self.base and self.base_config:
            raise UsageError("--base and --base-config exclude each other")
        base, _ = read_shape(self.base or self.base_config, "--base or --base-config", bool(self.base_config))
        shape = read_shape(self.to, "--to", is_file=False)[0] if self.to else None
        hyperparameters = BaseHyperparameters(
            self.learning_rate, self.epsilon, self.weight_decay, self._spreads(), self.no_decay or ()
        )
        model, optimizer, roles, example = self._load()
        if roles is not None and shape is None:
            raise UsageError("--to is missing: a model that comes with roles needs its shape, --to N,H,L")
        fresh = False if self.trained else None
        found = audit_model(
            self.parametrization(base),
            model,
            optimizer,
            hyperparameters,
            roles,
            shape,
            folded=not self.applied,
            fresh=fresh,
            example=example,
        )
        print(json.dumps(found.as_dict(), indent=1) if self.json else found)
        return 1 if self.strict and not found.passed else 0

    def _spreads(self) -> dict[str, float]:
        from manyheads.errors import UsageError

        if self.stds is None:
            return {}
        try:
            found = json.loads(self.stds.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nothing that Python converts
            raise UsageError(f"--stds {self.stds}: cannot be read as JSON ({error})") from error
        if not isinstance(found, dict) or not all(type(value) in (int, float) for value in found.values()):
            raise UsageError(f'--stds {self.stds}: expected an object from role to number, {{"query": 0.02}}')
        return found

    def _load(self) -> tuple[Any, ...]:
        from manyheads.errors import UsageError

        made = load_function(self.target)()
        if not isinstance(made, tuple) or not 2 <= len(made) <= 4:
            raise UsageError(
                f"{self.target} returned {type(made).__name__}: expected (model, optimizer), or (model, optimizer, "
                "roles) with roles from patterns of names to parts, or (model, optimizer, roles, example)"
            )
        return (*made, None, None)[:4]

"""`manyheads scale`: hyperparameters of every weight at another shape, from those tuned at a base shape."""

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import tyro

from manyheads.cli.parsing import ABSENT, Switch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from manyheads.limits import BaseHyperparameters, Parametrization, Table
    from manyheads.transformer import Shape

Sizes = Annotated[Optional[str], tyro.conf.arg(metavar="N,H,L", help_behavior_hint="")]
Target = Annotated[Optional[str], tyro.conf.arg(metavar="N,H,L|FILE", help_behavior_hint="")]


@dataclass(frozen=True)
class Theory:
    """Flags shared by scale, scale audit and scale check: the base shape and the parametrization."""

    base: Sizes = None
    """Tuned shape: key dimension N, heads H, depth L."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer; AdamW counts as adam."""
    logit_exponent: float = 1.0
    """Attention logits are divided by N to this power: 1, or 0.5, which keeps heads different from each other."""
    depth_exponent: float = 1.0
    """Branches are divided by L to this power, from 0.5 to 1, where every block keeps learning features."""
    richness: float = 1.0
    """Factor of gamma0 over the base's: above 1 for more feature learning."""
    scheme: Literal["limits", "mup", "standard"] = "limits"
    """Consistent in N, H and L; or, to compare, in width alone (mup), or one learning rate for all (standard)."""

    def parametrization(self, base: "Shape", form: Any = "effective") -> "Parametrization":
        """Build the parametrization."""
        from manyheads.limits import Parametrization

        # The standard scheme divides logits by the root of N; at the base both exponents agree.
        exponent = 0.5 if self.scheme == "standard" else self.logit_exponent
        return Parametrization(
            exponent, self.depth_exponent, self.richness, self.optimizer, base=base, scheme=self.scheme, form=form
        )


@dataclass(frozen=True)
class Scale(Theory):
    """Scale init, learning rate, epsilon and weight decay of every weight from a tuned shape to another one.

    Compare: 'manyheads scale audit' checks a PyTorch model and its optimizer against these numbers, and 'manyheads
    scale check' trains small transformers at several sizes to test them.
    """

    base_config: Annotated[Optional[str], tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """A config.json, or a folder with one, instead of --base."""
    to: Target = None
    """Shape to train: N,H,L, or a config.json, or a folder with one."""
    learning_rate: Annotated[Optional[float], ABSENT] = None
    """Learning rate that was tuned at the base; without it factors are shown."""
    epsilon: float = 1e-8
    """Adam's epsilon at the base."""
    weight_decay: float = 0.0
    """Decoupled weight decay at the base."""
    form: Literal["effective", "multiplier"] = "effective"
    """Scale init and learning rate, or multiply the weights in the forward pass at one learning rate."""
    snippet: Annotated[Optional[Literal["optax", "torch"]], ABSENT] = None
    """Print a runnable program instead of the table."""
    json: Switch = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Print the table, its JSON, or a program; return the exit status.

        Raises
        ------
        UsageError
            A shape is missing or cannot be read, or flags exclude each other.
        """
        from manyheads.errors import UsageError
        from manyheads.limits import BaseHyperparameters
        from manyheads.limits.parametrization.targets import refuse_depth

        if self.snippet and self.json:
            raise UsageError("--snippet and --json exclude each other: give one of them")
        if self.base and self.base_config:
            raise UsageError("--base and --base-config exclude each other: give one of them")
        base, base_notes = read_shape(self.base or self.base_config, "--base or --base-config", bool(self.base_config))
        shape, notes = read_shape(self.to, "--to")
        hyperparameters = BaseHyperparameters(
            1.0 if self.learning_rate is None else self.learning_rate, self.epsilon, self.weight_decay
        )
        parametrization = self.parametrization(base, self.form)
        if notes and notes.post_norm:
            refuse_depth(parametrization, shape)
        if self.snippet:
            if self.learning_rate is None:
                raise UsageError("--snippet needs --learning-rate, the learning rate that was tuned at the base")
            print(self._program(parametrization, shape, hyperparameters, notes), end="")
            return 0
        table = parametrization.table(shape)
        remarks = list(dict.fromkeys([*_compare(base_notes, notes, parametrization, shape), *table.outside]))
        if self.json:
            print(json.dumps(as_json(table, hyperparameters, remarks), indent=1))
        else:
            print_table(parametrization, table, hyperparameters, remarks, factors=self.learning_rate is None)
        return 0

    def _program(
        self,
        parametrization: "Parametrization",
        shape: "Shape",
        hyperparameters: "BaseHyperparameters",
        notes: "Notes | None",
    ) -> str:
        from manyheads.limits.parametrization.programs import optax_snippet, torch_snippet, transformers_snippet

        if self.snippet == "optax":
            return optax_snippet(parametrization, shape, hyperparameters)
        if notes is None or not notes.family:
            return torch_snippet(parametrization, shape, hyperparameters)
        return transformers_snippet(parametrization, shape, hyperparameters, str(self.to), notes.fused)


@dataclass(frozen=True)
class Notes:
    """Properties of a configuration beside its shape."""

    mlp_ratio: float = 4.0
    group: int = 1  # query heads that share a key head
    tied: Switch = False
    family: str = ""  # of transformers; empty for fields of our own
    post_norm: Switch = False
    fused: bool = False  # queries, keys and values in one matrix


def read_shape(text: str | None, flag: str, is_file: bool | None = None) -> "tuple[Shape, Notes | None]":
    """Read a shape from N,H,L or from a configuration, with the configuration's other properties.

    Raises
    ------
    UsageError, FileRefused
        Not three positive integers; no such file; heads that do not make up the width; attention that the theory does
        not describe; or a configuration that cannot be read.
    """
    from manyheads.errors import UsageError
    from manyheads.transformer import Shape

    if text is None:
        raise UsageError(f"{flag} is missing: give N,H,L (key dimension, heads, depth), such as 64,12,12")
    if is_file or (is_file is None and os.path.exists(text)):
        return _shape_of_config(text, flag)
    try:
        key_dim, heads, depth = map(int, text.split(","))
    except ValueError:
        instead = " (a config.json goes to --base-config)" if "--base-config" in flag else ", not a file"
        instead = ", or a config.json that exists" if is_file is None else instead
        raise UsageError(
            f"{flag} {text!r}: expected N,H,L, three integers for key dimension, heads and depth, such as 64,12,12"
            f"{instead}"
        ) from None
    return Shape(key_dim, heads, depth), None


def _shape_of_config(path: str, flag: str) -> "tuple[Shape, Notes]":
    from manyheads.errors import UsageError
    from manyheads.models.config import load_config
    from manyheads.models.shape import shape_of
    from manyheads.transformer import Shape

    if not os.path.exists(path):
        raise UsageError(f"{flag} {path}: no such file; give a config.json, or a folder with one")
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "config.json")):
        raise UsageError(f"{flag} {path}: there is no config.json in this folder; give one that has it, or N,H,L")
    config, origin = load_config(path)
    model = shape_of(config, origin)
    heads, key_dim = model.heads, model.head_dim or model.width // model.heads
    if key_dim * heads != model.width:
        raise UsageError(
            f"{flag} {path}: {heads} heads of dimension {key_dim} make {key_dim * heads}, but the residual stream has "
            f"width {model.width}; the theory scales shapes with width = N H"
        )
    hidden = 4 * model.width if model.mlp_hidden is None else model.mlp_hidden
    notes = Notes(hidden / model.width, heads // (model.kv_heads or heads), model.tied)
    try:
        return Shape(key_dim, heads, model.layers), _describe(config, notes)
    except UsageError as error:
        raise UsageError(f"{flag} {path}: {error}") from error


def _describe(config: dict[str, Any], notes: Notes) -> Notes:
    """Add the properties of the family; refuse attention that the theory does not describe."""
    from manyheads.limits.parametrization.architecture import read_body

    family = config.get("model_type", "")
    if not family:
        return notes
    body = read_body(config)
    return replace(notes, family=family, post_norm=body.post_norm, fused=body.fused)


def _compare(base: Notes | None, target: Notes | None, parametrization: "Parametrization", shape: "Shape") -> list[str]:
    """Return remarks on properties of the configurations that the table does not show."""
    from manyheads.limits import forward_multipliers

    remarks = []
    known = target or base
    if known and known.post_norm:
        remarks.append(
            "post-norm: width and key dimension are scaled; depth is outside the theory, and stays the base's"
        )
    if known and known.tied:
        output = forward_multipliers(parametrization, shape).output
        if output == 1:
            outputs = "leave the outputs as they are"
        elif parametrization.form == "effective":
            outputs = f"multiply the outputs by {_number(output)}"
        else:
            outputs = "give the outputs the unembedding's multiplier"
        remarks.append(f"tied embeddings: scale the one matrix as the embedding, and {outputs}")
    if base and target and base.mlp_ratio != target.mlp_ratio:
        remarks.append(
            f"hidden width of the MLP: {base.mlp_ratio:g} d at the base and {target.mlp_ratio:g} d here; the theory "
            "keeps the ratio"
        )
    if base and target and base.group != target.group:
        remarks.append(
            f"grouped keys: {base.group} query heads share one at the base and {target.group} here; the theory keeps "
            "their number"
        )
    return remarks


def as_json(table: "Table", tuned: "BaseHyperparameters", remarks: "Sequence[str]") -> dict[str, Any]:
    """Return the table with its factors and the hyperparameters that they give."""
    numbers = (tuned.learning_rate, tuned.epsilon, tuned.weight_decay)
    data = table.as_dict() | {"outside": list(remarks)}
    data["base_hyperparameters"] = dict(zip(("learning_rate", "epsilon", "weight_decay"), numbers, strict=True))
    for row, shown in zip(table.rows, data["rows"], strict=True):
        shown["absolute"] = row.at(*numbers)
    data["logit_scale"] = table.logit_prefactor * table.shape.key_dim**-table.logit_exponent
    return data


def print_table(
    parametrization: "Parametrization",
    table: "Table",
    hyperparameters: "BaseHyperparameters",
    remarks: "Sequence[str]",
    factors: bool,
) -> None:
    """Print the table: classes with equal numbers in one row, power laws beside the numbers."""
    from rich.table import Table as Drawn

    p, base, shape = parametrization, table.base, table.shape
    adam, decays = p.optimizer == "adam", hyperparameters.weight_decay > 0
    names = {"initial": "init std"}
    names |= {"multiplier": "multiplier"} if p.form == "multiplier" else {}
    names |= {"learning_rate": "learning rate"} | ({"epsilon": "epsilon"} if adam else {})
    names |= {"weight_decay": "weight decay"} if decays else {}
    drawn = Drawn("weights", *names.values(), box=None, padding=(0, 3, 0, 0))
    for rows in _alike(table):
        at, cells = rows[0].at(hyperparameters.learning_rate, hyperparameters.epsilon, hyperparameters.weight_decay), []
        for name in names:
            times = name in ("initial", "multiplier") or (factors and name == "learning_rate")
            value = getattr(rows[0], name) if times else at[name]
            cells.append(_cell(value, _law(rows[0], name, p.richness), times))
        drawn.add_row("\n".join(_pairs([row.role for row in rows])), *cells)
    scale = table.logit_prefactor * shape.key_dim**-table.logit_exponent
    print(
        f"from  {_sizes(base)}\nto    {_sizes(shape)}\n"
        f"scheme {p.scheme!r}, {p.optimizer}, {p.form} form: logits over N^{table.logit_exponent:g}, "
        f"branches over L^{p.depth_exponent if p.scheme == 'limits' else 0:g}\n"
    )
    _console().print(drawn)
    print(
        f"\n× and powers of N, H and L{' and γ' if p.richness != 1 else ''} are relative to the base\n"
        f"logits     {_number(scale)} q·k\nbranches   × {_number(table.branch)}, for attention and MLP alike\n\n"
        "outside the theory:"
    )
    for remark in remarks:
        print(f"  * {remark}")


def _alike(table: "Table") -> "list[list[Any]]":
    """Group the rows with equal numbers and powers, in the table's order."""
    found: dict[Any, list[Any]] = {}
    for row in table.rows:
        numbers = (row.initial, row.multiplier, row.learning_rate, row.epsilon, row.weight_decay)
        found.setdefault((numbers, tuple(row.powers.items())), []).append(row)
    return list(found.values())


def _pairs(roles: list[str]) -> list[str]:
    """Return two roles a line."""
    return [", ".join(roles[start : start + 2]) for start in range(0, len(roles), 2)]


def _law(row: Any, name: str, richness: float) -> str:
    """Return the power law of a number, without richness if that is the base's."""
    law = row.powers.get(name, "1 / rate")
    kept = [part for part in law.split(" ") if richness != 1 or "γ" not in part]
    return " ".join(kept) or "1"


def _cell(value: float, law: str, times: bool) -> str:
    number = f"× {_number(value)}" if times else _number(value)
    return number if law == "1" else f"{number}  [dim]{law}[/dim]"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _sizes(shape: "Shape") -> str:
    return f"N = {shape.key_dim}, H = {shape.heads}, L = {shape.depth}   (width {shape.width})"


def _console() -> Any:
    import sys

    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)

"""`manyheads scale`: hyperparameters of every weight at another shape, from those tuned at a base shape."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import tyro

from manyheads.cli.help.wrapping import is_watched, wrap_output
from manyheads.cli.parsing import ABSENT, Builder, OptionalFloat, Switch
from manyheads.cli.scale.base_shape import Notes, TunedTheory, read_base, read_shape
from manyheads.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from manyheads.scaling import BaseHyperparameters, Parametrization
    from manyheads.scaling.parametrization.table import Row, Table
    from manyheads.transformer import Shape

WIDE = 160  # columns where the output is no terminal
OPTIMIZER_NAMES = {"muon": "Muon", "adam": "AdamW"}
LABELS = {
    "initial": "init std", "multiplier": "multiplier", "learning_rate": "learning rate", "epsilon": "epsilon",
    "weight_decay": "weight decay",
}  # fmt: skip
LATENT = (
    "latent attention: its low-rank factors are in no row here; torch_groups and the audit give them theirs, at the "
    "ranks of the base where a base of N,H,L leaves them out"
)
OF_MLP = "rows with F follow it, and outputs are bounded, not constant, while the ratio changes"
OF_KEYS = "rows with K follow it, as derived and measured at one width"
POST_NORM = "post-norm: width and key dimension are scaled; depth is outside the theory, and stays the base's"
TUNE_APART = "tune AdamW's learning rate at the base too, apart from Muon's: sweeping both at one ratio stops too early"
TUNE_GAINS = (
    "norms behind queries and keys: give their gains a rate of their own (--rates query_gain=RATE key_gain=RATE), "
    "tuned at a base of N >= 16, where the loss depends on it"
)
Target = Annotated[Optional[str], tyro.conf.arg(metavar="N,H,L|FILE", help_behavior_hint="")]


@dataclass(frozen=True)
class Scale(TunedTheory):
    """Scale init, learning rate, epsilon and weight decay of every weight from a tuned shape to another one.

    See also: 'manyheads scale audit' checks a PyTorch model and its optimizer against these numbers, 'manyheads scale
    preflight' trains your own model at several shapes, and 'manyheads scale check' small transformers to test them.
    """

    base_config: Annotated[Optional[str], tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """A config.json, or a folder with one, instead of --base."""
    to: Target = None  # Shape to train: N,H,L, or a config.json, or a folder with one.
    learning_rate: OptionalFloat = None  # Learning rate that was tuned at the base; without it factors are shown.
    form: Literal["effective", "multiplier"] = "effective"
    """Scale init and learning rate, or multiply the weights in the forward pass at one learning rate."""
    snippet: Annotated[Optional[Literal["optax", "torch"]], ABSENT] = None
    """Print a runnable program instead of the table."""
    explain: Switch = False  # Print a sentence for each class of weights instead of the table.
    model: Builder = None  # Function build(shape) of package.module: print the numbers of every parameter.
    json: Switch = False  # Print JSON instead of a table.

    def run(self) -> int:
        """Print the table, its JSON, or a program; return the exit status."""
        from manyheads.models.parts import UNDERIVED
        from manyheads.scaling import BaseHyperparameters
        from manyheads.scaling.parametrization.table import TRAINED_AS
        from manyheads.scaling.parametrization.targets import refuse_depth

        if len(asked := [f"--{name}" for name in ("snippet", "explain", "json") if getattr(self, name)]) > 1:
            raise UsageError(f"{' and '.join(asked)} exclude each other: give one of them")
        base, base_notes = read_base(self.base, self.base_config)
        shape, notes = read_shape(self.to, "--to")
        learning_rate = 1.0 if self.learning_rate is None else self.learning_rate
        if self.rates and self.learning_rate is None:
            raise UsageError("--rates without --learning-rate: give the rate of the other roles as well")
        apart = {"muon": self.tuned_muon(self.learning_rate is None), "learning_rates": self.own_rates()}
        hyperparameters = BaseHyperparameters(learning_rate, self.epsilon, self.weight_decay, **apart)
        hyperparameters = (change := self.change()).at(hyperparameters)
        origins = change.sentences() if self.batch or self.tokens else []
        parametrization = self.parametrization(base, self.form)
        if notes and base_notes and notes.experts != base_notes.experts:
            counts = " and ".join(f"{active} of {total}" for total, active in (base_notes.experts, notes.experts))
            raise UsageError(f"experts that a token visits, base and here: {counts}; {UNDERIVED['expert']}")
        if notes and base_notes and notes.latent != base_notes.latent:
            raise UsageError(
                "latent attention: the dimensions of a head with positions, those of its values over N, or whether "
                "queries have a latent differ from the base's, which no table describes; keep them as at the base"
            )
        if notes and notes.post_norm:
            refuse_depth(parametrization, shape)
        if self.model and (self.snippet or self.explain):
            raise UsageError("--model prints the numbers of every parameter: leave out --snippet and --explain")
        if self.model:
            from manyheads.cli.scale.roles import print_parameters

            print_parameters(self.model, parametrization, shape, hyperparameters, self.json)
            print(wrap_output("".join(f"note: {each}\n" for each in origins if not self.json)), end="")
            return 0
        if self.snippet:
            if self.learning_rate is None:
                raise UsageError("--snippet needs --learning-rate, the learning rate that was tuned at the base")
            print("".join(f"# {each}\n" for each in origins), end="")  # betas among them, which no program sets
            print(self._program(notes, (parametrization, shape, hyperparameters)), end="")
            return 0
        table = parametrization.table(shape)
        remarks = _compare(base_notes, notes, parametrization, shape) + _describe_own_rates(table, hyperparameters)
        remarks += [TUNE_APART, TUNE_GAINS] if self.optimizer == "muon" else []
        outside = [each for each in table.outside if not origins or each not in TRAINED_AS]
        remarks = list(dict.fromkeys([*remarks, *outside]))
        if self.json:
            shown = as_json(table, hyperparameters, remarks, self.richness)
            print(json.dumps(shown | ({"origins": origins} if origins else {}), indent=1))
        elif self.explain:
            given = (table, hyperparameters, self.richness, self.learning_rate is None)
            told = [*(explain(row, *given) for row in table.rows), *(f"note: {each}" for each in (*origins, *remarks))]
            print(wrap_output("\n".join(told)))
        else:
            print_table(parametrization, table, hyperparameters, remarks, origins, factors=self.learning_rate is None)
        return 0

    def _program(self, notes: Notes | None, given: "tuple[Parametrization, Shape, BaseHyperparameters]") -> str:
        from manyheads.scaling.parametrization.programs import optax_snippet, torch_snippet, transformers_snippet

        if self.snippet == "optax" or notes is None or not notes.family:
            return (optax_snippet if self.snippet == "optax" else torch_snippet)(*given)
        return transformers_snippet(*given, str(self.to), notes.fused)


def _compare(base: Notes | None, target: Notes | None, parametrization: "Parametrization", shape: "Shape") -> list[str]:
    """Return remarks on properties of the configurations that the table does not show."""
    from manyheads.scaling.parametrization.targets import forward_multipliers

    both = {"base": base, "target": target}
    remarks = [f"{which}: {note}" for which, read in both.items() if read for note in read.assumed]
    known = target or base
    remarks += [POST_NORM] if known and known.post_norm else []
    if known and known.tied:
        output = forward_multipliers(parametrization, shape).output
        scaled = f"multiply the outputs by {_number(output)}"
        outputs = scaled if parametrization.form == "effective" else "give the outputs the unembedding's multiplier"
        outputs = "leave the outputs as they are" if output == 1 else outputs
        remarks.append(f"tied embeddings: scale the one matrix as the embedding, and {outputs}")
    if base and target and base.mlp_ratio != target.mlp_ratio:
        widths = f"{base.mlp_ratio:g} d at the base and {target.mlp_ratio:g} d here"
        remarks.append(f"hidden width of the MLP: {widths}; {OF_MLP}")
    if base and target and base.group != target.group:
        remarks.append(
            f"grouped keys: {base.group} query heads share one at the base and {target.group} here; {OF_KEYS}"
        )
    return remarks + ([LATENT] if known and known.latent else [])


def _describe_own_rates(table: "Table", tuned: "BaseHyperparameters") -> list[str]:
    """Return remarks on learning rates of parts of roles, which no row shows."""
    from manyheads.models.parts import PARTS

    rows = {row.role: row for row in table.rows}
    parts = [part for part in tuned.learning_rates if part not in rows]
    if lost := [part for part in parts if PARTS.get(part) not in rows]:
        raise UsageError(f"--rates {lost[0]}: the table has no row of it, nor of a role that it is part of")
    rates = {part: tuned.rate_of((part,), rows[PARTS[part]].rule) * rows[PARTS[part]].learning_rate for part in parts}
    return [f"{part}: learning rate {_number(rate)}, tuned apart" for part, rate in rates.items()]


def as_json(
    table: "Table", tuned: "BaseHyperparameters", remarks: "Sequence[str]", richness: float
) -> dict[str, object]:
    """Return the table with its factors and the hyperparameters that they give."""
    data = table.as_dict() | {"outside": list(remarks)}
    rates = {"learning_rates": dict(tuned.learning_rates)} if tuned.learning_rates else {}
    data["base_hyperparameters"] = _tuned(tuned) | rates | ({"muon": _tuned(tuned.muon)} if tuned.muon else {})
    for row, shown in zip(table.rows, data["rows"], strict=True):
        shown["absolute"] = _absolute(row, tuned)
        shown["explanation"] = explain(row, table, tuned, richness)
    data["logit_scale"] = table.logit_prefactor * table.shape.key_dim**-table.logit_exponent
    return data


def explain(row: "Row", table: "Table", tuned: "BaseHyperparameters", richness: float, factors: bool = False) -> str:
    """Say in a sentence what the learning rate of a row is, and which sizes make it so."""
    from manyheads.scaling.parametrization.power_laws import SYMBOLS, Power

    law, rate = _law(row, "learning_rate", richness), tuned.rate_of((row.role,), row.rule)
    said = f"× {_number(row.learning_rate)}" if factors else f"{_number(rate)} → {_number(rate * row.learning_rate)}"
    ratios = {letter: Power(**{size: 1}).ratio(table.shape, table.base, richness) for size, letter in SYMBOLS.items()}
    fan_in = {"output": ratios["N"] * ratios["H"], "mlp_out": ratios["F"]}.get(row.role, ratios["D"])
    told = [f"{letter} {_grown(ratio)}" for letter, ratio in ratios.items() if letter in law and ratio != 1]
    cause = f"it follows {law}, and {' and '.join(told) or 'none of these changes'}"
    if law == "1":
        cause = "it follows no size"
    elif fan_in != 1 and abs(row.learning_rate * fan_in - 1) < 1e-9:
        cause = f"fan-in {_grown(fan_in)}"
    return f"{row.role}: learning rate {said}, because {cause}"


def _grown(ratio: float) -> str:
    return f"grows {_number(ratio)} times" if ratio > 1 else f"falls to {_number(ratio)} of the base's"


def _rows_of_one_rate(table: "Table", tuned: "BaseHyperparameters") -> "list[list[Row]]":
    """Split rows of equal factors where their learning rates at the base differ."""
    found: dict[tuple[int, float], list[Row]] = {}
    for place, rows in enumerate(table.alike()):
        for row in rows:
            found.setdefault((place, tuned.rate_of((row.role,), row.rule)), []).append(row)
    return list(found.values())


def _absolute(row: "Row", tuned: "BaseHyperparameters") -> dict[str, float]:
    """Return the hyperparameters of a row."""
    return row.at(**_tuned(tuned.of(row.rule)) | {"learning_rate": tuned.rate_of((row.role,), row.rule)})


def _tuned(own: object) -> dict[str, float]:
    return {name: getattr(own, name) for name in ("learning_rate", "epsilon", "weight_decay")}


def print_table(
    p: "Parametrization",
    table: "Table",
    tuned: "BaseHyperparameters",
    remarks: "Sequence[str]",
    origins: "Sequence[str]",
    factors: bool,
) -> None:
    """Print the table: classes with equal numbers in one row, power laws beside the numbers."""
    from rich.table import Table as Drawn

    from manyheads.scaling.parametrization.muon import FACTORS

    base, shape = table.base, table.shape
    muon = p.optimizer == "muon"
    adam, decays = p.optimizer != "sgd", tuned.weight_decay > 0 or muon
    given = {"multiplier": p.form == "multiplier", "epsilon": adam, "weight_decay": decays}
    names = {name: label for name, label in LABELS.items() if given.get(name, True)}
    columns = (["optimizer"] if muon else []) + list(names.values())
    drawn, stacked = Drawn("weights", *columns, box=None, padding=(0, 3, 0, 0)), list[str]()
    for rows in _rows_of_one_rate(table, tuned):
        at = _absolute(rows[0], tuned)
        cells = [OPTIMIZER_NAMES[rows[0].rule]] if muon else []
        for name in names:
            times = name in ("initial", "multiplier") or (factors and name == "learning_rate")
            value = getattr(rows[0], name) if times else at[name]
            cells.append(_cell(value, _law(rows[0], name, p.richness), times))
        roles = [row.role for row in rows]
        drawn.add_row("\n".join(", ".join(roles[place : place + 2]) for place in range(0, len(roles), 2)), *cells)
        stacked += [", ".join(roles), *(f"    {name:<15}{cell}" for name, cell in zip(columns, cells, strict=True))]
    scale = table.logit_prefactor * shape.key_dim**-table.logit_exponent
    variant = f" ({p.muon.split}, shape factor {FACTORS[p.muon.factor].formula})" if muon else ""
    about = (
        f"from  {_sizes(base)}\nto    {_sizes(shape)}\n"
        f"scheme {p.scheme!r}, {p.optimizer}{variant}, {p.form} form: logits over N^{table.logit_exponent:g}, "
        f"branches over L^{p.depth_exponent if p.scheme == 'completep' else 0:g}"
    )
    print(f"{wrap_output(about)}\n")
    console = _console()
    narrow = console.width < _console(WIDE).measure(drawn).maximum - 3  # of the padding behind the last column
    for shown in stacked if narrow else (drawn,):
        console.print(shown)
    below = (
        f"× and powers of N, H and L{' and γ' if p.richness != 1 else ''} are relative to the base\n"
        f"logits     {_number(scale)} q·k\nbranches   × {_number(table.branch)}, for attention and MLP alike"
    )
    for title, told in (("where the numbers come from", origins), ("outside the theory", remarks)):
        below += "\n".join([f"\n\n{title}:", *(f"  * {each}" for each in told)]) if told else ""
    print("\n" + wrap_output(below))


def _law(row: "Row", name: str, richness: float) -> str:
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


def _console(width: int | None = None) -> Any:
    from rich.console import Console

    return Console(width=width or (None if is_watched() else WIDE), highlight=False)

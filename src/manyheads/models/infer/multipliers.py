"""Multipliers of a forward pass, by what they multiply, from its trace and the parts of its parameters.

Constants since the last product, norm or nonlinearity are told apart: those on logits, on branches, on outputs, on
embeddings and positions, on the stream between blocks, and in front of every weight. No number of a weight matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.infer.roles import READS_STREAM, SHARED, Roles
from manyheads.models.infer.trace import Trace
from manyheads.models.infer.traced_model import trace_model
from manyheads.models.infer.values import UNKNOWN
from manyheads.models.names import join_layers
from manyheads.models.parts import Architecture, Parameter
from manyheads.models.torch.lazy_torch import Module, torch
from manyheads.models.torch.model import TorchModel

ACCURACY = 1e-4  # relative, of a multiplier, where numbers are not rounded more coarsely
READS = {**dict.fromkeys((*READS_STREAM, "query_up", "key_value_up"), "input"), "output": "value", "mlp_out": "hidden"}
"""Part of a weight → what it reads."""
SOURCES = {"input": "the norm before it, or the stream", "value": "its values", "hidden": "its hidden units"}
UNSEEN = {
    "logit": "no softmax over logits was seen",
    "branch": "no branch that is added to a stream was seen",
    "output": "no unembedding reaches the outputs",
    "embedding": "no embeddings reach the first block",
}
WRITTEN_OUT = ((1.0, 1.0), (0.5, 1.0), (0.5**0.5, 0.5**0.5), (1 / 1.702, 1.702))
"""x f(x) of SiLU, GELU by tanh, by erf and by a sigmoid: the factor of x over that in f, and that in f."""
ONE_TRACE = {"hidden": "unembedding", "hidden_bias": "unembedding_bias", "blank": "marker"}
"""Part → what a trace at one shape shows as well."""


@dataclass
class Multiplier:
    """One multiplier of a model."""

    values: dict[str, float] = field(default_factory=dict)  # weight → number
    unknown: list[str] = field(default_factory=list)  # why there is none
    normed: bool = False  # whether a norm without gains stands before it, so that no weight can carry a factor


@dataclass
class ForwardPass:
    """The multipliers of a model, and the relative accuracy with which they are known."""

    logit: Multiplier = field(default_factory=Multiplier)
    branch: Multiplier = field(default_factory=Multiplier)
    output: Multiplier = field(default_factory=Multiplier)
    embedding: Multiplier = field(default_factory=Multiplier)
    position: Multiplier = field(default_factory=Multiplier)
    stream: Multiplier = field(default_factory=Multiplier)
    input: Multiplier = field(default_factory=Multiplier)
    value: Multiplier = field(default_factory=Multiplier)
    hidden: Multiplier = field(default_factory=Multiplier)
    bias: Multiplier = field(default_factory=Multiplier)  # over what it is added to; sinks as well
    gate: Multiplier = field(default_factory=Multiplier)
    accuracy: float = ACCURACY
    roles: Roles | None = None  # as traced; None where they are known, or the trace is lost
    acting: tuple[Parameter, ...] = ()  # trained, with the parts of the trace


def read_multipliers(model: Module, read: TorchModel, example: Any = None) -> ForwardPass:
    """Trace one forward pass of a model whose parts are known, and read off what it multiplies."""
    rounding = max(torch.finfo(t.dtype).eps for t in read.tensors.values() if t.is_floating_point())
    found = ForwardPass(accuracy=max(ACCURACY, rounding))
    try:
        tensors, trace = trace_model(model, example)
        lost = [reason for reason in trace.refused if "the operation" in reason]
    except UsageError as error:
        trace, lost = Trace(), [str(error)]
    if lost:
        for each in vars(found).values():
            if isinstance(each, Multiplier):
                each.unknown += lost[:1]
        return found
    if not read.architecture.family and read.architecture.forward is None:
        found.roles = Roles(trace, tensors, frozenset(map(join_layers, tensors)) - tensors.keys())
        found.acting = show_parts(read.architecture, found.roles)
    _Reader(found, trace, read).read()
    return found


def show_parts(architecture: Architecture, roles: Roles) -> tuple[Parameter, ...]:
    """Return the trained parameters with the parts of a trace, where it shows one that differs.

    Of as many queries as keys neither is first: the same logits are their product in both orders.
    """
    found, shape = [], architecture.shape
    for parameter in architecture.parameters:
        named = [*parameter.parts, *["unembedding"] * parameter.tied]
        shown = [] if parameter.name in roles.why else roles.parts.get(parameter.name, [])
        first = "query" if shape.group_heads < shape.heads else "key"
        one, other = (sorted(part.replace("query", first) for part in some) for some in (named, shown))
        if shown and one != other and [ONE_TRACE.get(part) for part in named] != shown:
            parameter = replace(parameter, parts=tuple(shown), tied=False, closes=False)
        found.append(parameter)
    return tuple(found)


class _Reader:
    """Events of a trace, sorted by what the parts of weights say."""

    def __init__(self, found: ForwardPass, trace: Trace, read: TorchModel) -> None:
        self.found, self.trace = found, trace
        self.matrices = {name for name, tensor in {**read.tensors, **read.frozen}.items() if tensor.dim() > 1}
        self.parameters = (*read.architecture.parameters, *read.architecture.frozen)
        acting = [each for each in found.acting if each.name in self.matrices]  # gains carry factors by their names
        self.parts = {each.name: {*each.parts, *(["unembedding"] * each.tied)} for each in (*self.parameters, *acting)}

    def read(self) -> None:
        """Read all multipliers."""
        self.read_logits()
        for weight, branches in self.trace.writes.items():
            for branch in branches if self.has([weight], "output", "mlp_out") else ():
                post = self.has(branch.gains, "attention_post_gain", "mlp_post_gain")
                hidden = self.trace.post_norm or (branch.normed and not post)
                why = "what is added to the stream does not follow {}" + ": a norm stands behind it" * hidden
                if (roles := self.found.roles) and SHARED in (reason := roles.why.get(weight, "")):
                    hidden, why = True, f"{{}}: {reason}"
                self.keep("branch", weight, UNKNOWN if hidden else branch.own, why)
        for weight, number in self.trace.scales["output"].items():
            if self.has([weight], "unembedding"):
                self.keep("output", weight, number, "the outputs do not follow {}")
        for weight, number in self.trace.scales["stream"].items():
            self.keep("stream", weight, number, "the stream to which {} adds does not follow the block before it")
        for weight in {product.weight for product in self.trace.products} - self.trace.writes.keys():
            if self.has([weight], "output", "mlp_out"):
                self.keep("branch", weight, UNKNOWN, "what {} puts out is not added to a stream")
        for kind, what in {"bias": "bias", "sink": "bias", "gate": "gate"}.items():
            for name, number in self.trace.scales[kind].items():
                self.keep(what, name, number, f"the {kind} of {{}} has no single multiplier")
        self.read_closing()
        self.read_tables()
        self.read_inputs()
        for kind, reason in UNSEEN.items():
            multiplier = getattr(self.found, kind)
            if not multiplier.values and not multiplier.unknown:
                multiplier.unknown.append(reason)

    def read_logits(self) -> None:
        """Read the multiplier of q . k, of normalized ones where a norm without gains stands before it."""
        for number, core in enumerate(self.trace.cores):
            name, query = min(core.query.weights, default=f"attention {number}"), core.query
            self.found.logit.normed |= query.normed and not self.has(query.gains, "query_gain")
            scale = self.trace.scales["logit"][number] / (query.taken * core.key.taken)
            self.keep("logit", name, scale, "the logits do not follow what {} puts out")

    def read_closing(self) -> None:
        """Check that a tied table reads the norm that would carry its multiplier, and nothing else does."""
        tied = {name for name in self.trace.scales["output"] if self.has([name], "unembedding")}
        for name in [each.name for each in self.parameters if each.closes and each.start == "one"]:
            readers = {weight for _, weight in self.trace.readers.get(name, ())}
            uses = [product.x.gains == {name} for product in self.trace.products if product.weight in tied]
            if not readers or readers - tied or not all(uses):
                reason = f"no output of the last norm, {shorten(name)}, alone reaches the unembedding"
                self.found.output.unknown.append(reason)

    def read_tables(self) -> None:
        """Read the multipliers of embeddings and positions, fixed ones as well."""
        for name, number in {**self.trace.scales["embedding"], **self.trace.scales["position"]}.items():
            if self.has([name], "embedding", "patch"):
                self.keep("embedding", name, number, "the stream below the first block does not follow {}")
            elif self.has([name], "positional", "marker", "blank") or name not in self.parts:
                self.keep("position", name, number, "the stream below the first block holds more than known tables")
        position = self.found.position
        missing = [name for name in sorted(self.matrices) if self.has([name], "positional")]
        if missing and not position.values and not position.unknown:
            position.unknown.append(f"{missing[0]} is not added to the stream below the first block")

    def read_inputs(self) -> None:
        """Read the multipliers in front of every weight, and of the nonlinearity behind it.

        Before normalized queries and keys no factor acts.
        """
        kinds = {name: {READS[part] for part in self.parts.get(name, ()) if part in READS} for name in self.matrices}
        sides = [side for core in self.trace.cores for side in core[:3]]
        plain = {name for side in sides if not side.normed for name in side.weights}
        normed = {name for side in sides if side.normed for name in side.weights} - plain
        for product in self.trace.products:
            name = product.weight
            for kind in sorted(kinds.get(name, ()))[:1] if name not in normed else ():
                half = math.isclose(abs(product.x.own), 0.5)  # which may belong to GELU, written behind it
                written = [self.in_front(each) for each in product.x.weights & self.trace.straight.keys()]
                unsure = kind == "hidden" and any(half or math.isnan(each) for each in written)
                why = f"what goes into {{}} does not follow {SOURCES[kind]}"
                self.keep(kind, name, UNKNOWN if unsure else product.x.own, why)
            if self.has([name], "mlp_in", "mlp_gate") and name in self.trace.bent:
                number, label = self.in_front(name) / product.x.scale, f"{shorten(name)}, in front of its activation,"
                self.keep("hidden", label, number, "what follows {} is no known activation")
        for name in sorted(kinds.keys() - {each.weight for each in self.trace.products}):
            for kind in kinds[name]:
                reason = f"no product with the weights of {shorten(name)} was seen"
                getattr(self.found, kind).unknown.append(reason)

    def in_front(self, name: str) -> float:
        """Return the constants in front of a nonlinearity, without those of one that is written out."""
        within = self.trace.bent[name]
        if name not in self.trace.straight:
            return within
        ratio = self.trace.straight[name] / within
        return next((within / own for each, own in WRITTEN_OUT if math.isclose(ratio, each, rel_tol=1e-4)), UNKNOWN)

    def has(self, names: Iterable[str], *parts: str) -> bool:
        """Whether any of these parameters has one of these parts."""
        return any(self.parts.get(name, set()) & set(parts) for name in names)

    def keep(self, kind: str, name: str, number: float, why: str) -> None:
        """Keep a number of a weight, or the reason why there is none."""
        multiplier, name = getattr(self.found, kind), shorten(name)
        if math.isnan(number):
            multiplier.unknown.append(next((each for each in self.trace.refused if name in each), why.format(name)))
        else:
            name = name if multiplier.values.get(name, number) == number else f"{name} ({len(multiplier.values)})"
            multiplier.values[name] = number


def shorten(name: str) -> str:
    """Leave out the end of a name that most weights share."""
    return name.removesuffix(".weight")

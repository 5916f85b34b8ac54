"""A traced PyTorch model: parts of its parameters, its shape, its multipliers, and their comparison with the base."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.infer.roles import READS_STREAM, UNUSED, Roles
from manyheads.models.infer.torch_trace import name_parameters, trace_module
from manyheads.models.infer.trace import Trace
from manyheads.models.names import join_layers
from manyheads.models.parts import PARTS, Architecture, ForwardMultipliers, Parameter, init_of
from manyheads.models.torch.lazy_torch import Tensor, torch
from manyheads.models.torch.modules import whole
from manyheads.transformer.shape import Shape

TOKENS, FEWER = 7, 5  # lengths of the two sequences that are tried where no example is given
SIZES = {
    "bias": "beside what it is added to",
    "sink": "in the logits",
    "terms": "as terms of a sum",
    "gate": "by its gate",
}
ALONE = {"inner": "before a nonlinearity", "position": "as a position"}
WHERE = {"logit": "in its logits", "branch": "on its branch", "output": "on outputs", "embedding": "on embeddings"}
KINDS = {"logit": "the logits are", "branch": "a branch is", "output": "the outputs are", "embedding": "embeddings are"}


class TracedModel:
    """A model, its trace, and the parts that follow."""

    def __init__(self, model: Any, example: Any, inside: frozenset[str]) -> None:
        self.inside = inside
        self.tensors, self.trace = trace_model(model, example)
        self.roles = Roles(self.trace, self.tensors, inside)
        self.parts = {name: tuple(parts) for name, parts in self.roles.parts.items()}
        self.renamed: dict[str, tuple[str, ...]] = {}  # name → part that only a start or a comparison tells
        self.starts: dict[str, float] = {}  # name, layers joined as well → gain, where it does not start at one
        for name, found in self.trace.added.items():
            for kind, beside in found:
                fan_in = self.roles.uses[beside][0].fan_in if kind == "bias" else 0
                if fan_in and 1 < self.tensors[beside].numel() // fan_in < self.tensors[name].numel():
                    self.roles.refuse(name, f"it is added to {beside} with a row for each position: this has no role")
        self.alone: list[str] = []  # a reason from which all others follow
        if not self.trace.writes and self.trace.cores:
            first = [name for name, level in self.roles.level.items() if level == 1]
            between = set(first) - frozenset().union(*(side.weights for side in self.trace.cores[0][:3]))
            where = "between the embeddings and the stream, it has no role"
            self.alone = [f"{min(between)}: {where}" if between else "no branch is added to a stream: no role is known"]
        if not any(kinds & {"embedding", "patch"} for kinds in self.trace.tables.values()):
            self.trace.refuse("no table is read by what differs between two sequences: give example=, with two of them")
        self.unsized: list[str] = []  # why one shape does not describe it
        self.shape = self._read_shape()

    def _read_shape(self) -> Shape | None:
        """Read N, H, L, D, K, F and ranks off the products; None where they tell none."""
        cores, roles = self.trace.cores, self.roles
        uses = {name: some for name, some in roles.uses.items() if some[0].fan_in and name not in roles.why}
        fan_in: dict[str, set[int]] = defaultdict(set)  # part → numbers that its weights sum over
        for name, some in uses.items():
            for part in self.parts[name]:
                fan_in[part].add(some[0].fan_in)
        if not cores or not fan_in["output"]:
            missing = "matrix that reads attention" if cores else "product of queries and keys"
            self.unsized.append(f"no {missing} was seen: no attention")
            return None
        n, value_dim, hidden = cores[0].key_dim, cores[0].value_dim, fan_in["mlp_out"]
        heads, groups = max(fan_in["output"]) // value_dim, set()
        plain = [name for name in sorted(cores[0].query.weights & uses.keys()) if self.parts[name] == ("query",)]
        rows = [self.rows(name) for name in plain]
        if heads < 1 or (rows and heads * n not in (*rows, sum(rows))):
            name = next(name for name in uses if "output" in self.parts[name])
            said = f"{name} sums over {max(fan_in['output'])} numbers of attention, {value_dim} a head"
            self.unsized.append(f"{said}, and {sum(rows) // n} heads make queries: no shape has these")
            return None
        for name in uses if not fan_in["key_value_up"] else ():
            if "key" in (parts := self.parts[name]):
                size = self.rows(name) - heads * n * ("query" in parts)
                size -= max(hidden, default=0) * sum("mlp" in each for each in parts)
                groups.add(size // (n + value_dim * ("value" in parts)))
        if len({core[3:] for core in cores}) > 1 or len(groups) > 1 or (len(hidden) > 1 and not fan_in["router"]):
            self.unsized.append("layers of different sizes: one shape does not describe them")
        width, key_heads = roles.width, min(groups, default=heads)
        if key_heads < 1 or heads % key_heads:
            self.unsized.append(f"{heads} heads of queries and {key_heads} of keys: no shape has these")
            return None
        ranks = (min(fan_in[part], default=None) for part in ("query_up", "key_value_up"))
        mlp = min(hidden) if len(hidden) == 1 else None
        return Shape(n, heads, len(cores), None if width == heads * n else width, key_heads, mlp, *ranks)

    def rows(self, name: str) -> int:
        """Return how many numbers each slice of a weight puts out."""
        some = self.roles.uses[name]
        return int(self.tensors[name].numel() // (some[0].fan_in * len({each.part for each in some})))

    def sides(self, part: str, other: TracedModel) -> tuple[int, int]:
        """Return what the weights of a part sum over, and put out, as the table takes them; 0 if it takes nothing."""
        assert self.shape is not None
        assert other.shape is not None
        shape, n, v = self.shape, *self.trace.cores[0][3:]
        hidden = (other.shape.hidden and shape.hidden) or shape.width
        keys = shape.group_heads * (not shape.key_value_rank)
        fan_in = {"output": shape.heads * n, "mlp_out": hidden, "patch": 1, "query_up": shape.query_rank or 1}
        fan_in |= {"key_value_up": shape.key_value_rank or 1}
        fan_in |= dict.fromkeys((*READS_STREAM, "unembedding", "hidden"), shape.width)
        rows = {"query": shape.heads * n, "key": keys * n, "value": keys * v, "router": 1}
        rows |= dict.fromkeys(("mlp_in", "mlp_gate"), hidden)
        return fan_in.get(part, 0), rows.get(part, 0)

    def compare_sides(self, base: TracedModel) -> Iterator[str]:
        """Yield weights whose sides do not follow the shape as the table takes them to do."""
        for name, some in self.roles.uses.items() if self.shape and base.shape else ():
            known = [product for each in base.alike(name, base.roles.uses) for product in each]
            sides = [
                (self.sides(part, base), base.sides(part, self)) for part in self.parts[name] if part != "embedding"
            ]
            seen, before = ({each.fan_in for each in products} for products in (some, known))
            takes = {size * own / other for (own, _), (other, _) in sides if own for size in before}
            if takes and seen - takes - {0}:
                yield f"{name} sums over {max(seen)} numbers, and the table takes {max(takes):.4g}"
            elif known and sides and 0 not in {*seen, *before, *(rows for (_, rows), _ in sides)}:
                ratio = sum(rows for (_, rows), _ in sides) / sum(rows for _, (_, rows) in sides)
                if self.rows(name) != (size := base.rows(known[0].weight) * ratio):
                    yield f"{name} puts out {self.rows(name)} numbers, and the table takes {size:.4g}"

    # What the base knows, and another shape does not

    def find_starts(self, sides: Mapping[str, tuple[str, ...]]) -> None:
        """Find tokens that start at zero, gains that do not start at one, and read-outs as wide as the stream."""
        for name, parts in self.parts.items():
            tensor = whole(self.tensors[name])
            grows = [bool(set(side.split()) & {"N", "H"}) for side in sides.get(name, ())]
            if parts == ("marker",) and not tensor.any():
                self.renamed[name] = ("blank",)
            elif parts == ("unembedding",) and len(grows) == 2 and all(grows):
                self.renamed[name] = ("hidden",)
            elif parts == ("router",) and len(grows) > 1 and all(grows[-2:]):
                self.roles.refuse(name, "it gates a branch and both its sides grow: it is no router")
            elif parts and init_of(parts[0]) == "one" and bool((tensor == tensor.flatten()[0]).all()):
                start = float(tensor.flatten()[0]) + self.trace.offsets.get(name, 0.0)
                self.starts |= {join_layers(name): start, name: start}

    def released(self) -> TracedModel:
        """Keep the sides of parameters without their numbers."""
        for name, tensor in self.tensors.items():
            self.tensors[name] = torch.empty(tensor.shape, device="meta").requires_grad_(tensor.requires_grad)
        return self

    def settle(self, base: TracedModel) -> None:
        """Take from the base what only it or a comparison of shapes tells."""
        for name, parts in self.parts.items():
            beside = [base.renamed.get(each) for _, each in self.trace.added.get(name, ())]
            if ("hidden",) in beside and parts == ("unembedding_bias",):
                parts = ("hidden_bias",)
            self.parts[name] = base.renamed.get(name, parts)

    # Multipliers

    def alike(self, name: str, found: Mapping[str, Any]) -> list[Any]:
        """Return what is found for a name, or for those of the same name in other layers."""
        if name in found:
            return [found[name]]
        return [each for other, each in found.items() if join_layers(other) == join_layers(name)]

    def multipliers(self) -> dict[str, dict[str, list[float]]]:
        """Return the constants that are multiplied: kind → what they multiply → different numbers."""
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for kind, by_name in self.trace.scales.items():
            for name, number in by_name.items():
                parts = self.parts.get(str(name), ())
                label = "+".join(parts) if kind == "branch" else str(name) if kind in (*SIZES, *ALONE) else ""
                if kind == "stream" or (kind == "output" and "unembedding" not in parts) or math.isnan(number):
                    continue
                numbers = found[kind][label]
                if not any(math.isclose(number, each, rel_tol=1e-6) for each in numbers):
                    numbers.append(number)
        return found

    def compare(self, base: TracedModel, words: str = "this shape") -> list[str]:
        """Return where parts, or multipliers that no parametrization has, differ from the base."""
        here, before = self.multipliers(), base.multipliers()
        reasons = [f"{reason} at {words}" for reason in self.compare_sides(base)]
        for name, parts in self.parts.items():
            known = base.alike(name, base.parts)
            if name not in base.parts and len(self.trace.cores) == len(base.trace.cores):
                reasons.append(
                    f"{name} is at {words} and not at the base: only L may change how many weights there are"
                )
            if parts and known and not any(set(parts) == set(each) for each in known):
                shown = "+".join(min(known))
                reasons.append(f"{name} is {'+'.join(parts)} at {words} and {shown or 'without a part'} at the base")
        for kind, where in (ALONE | SIZES).items():
            for name, mine in here[kind].items():
                theirs = base.alike(name, before[kind])
                if theirs and not any(_same(mine, each) for each in theirs):
                    said = f"{_list(mine)} {where} at {words} and {_list(theirs[0])} at the base"
                    reasons.append(f"{name} is multiplied by {said}: this has no role")
        return reasons

    def forward(self, base: TracedModel) -> ForwardMultipliers:
        """Return what is multiplied relative to the base."""
        found, mine, theirs = {}, self.multipliers(), base.multipliers()
        for kind, words in KINDS.items():
            ratios = []
            for label, there in theirs[kind].items():
                own = mine[kind].get(label, there)
                alone = len(own) == len(there) == 1
                ratios.append(1.0 if _same(own, there) else own[0] / there[0] if alone else math.nan)
            if not _same(ratios, ratios[:1]):
                shown = _list([each for some in mine[kind].values() for each in some])
                name = next((each for each in self.trace.scales[kind] if each in self.parts), "attention")
                refuse([f"{name}: {words} multiplied by {shown}, in which one factor over the base is not seen"])
            found[kind] = ratios[0] if ratios else 1.0
        return ForwardMultipliers(**found)

    # The result

    def reasons(self) -> list[str]:
        """Return why the model has no roles; frozen parameters may be unused."""
        if self.alone:
            return self.alone
        others = " ".join(self.trace.refused)
        said = [
            f"{name}: {reason}"
            for name, reason in self.roles.why.items()
            if reason and not (reason.startswith(UNUSED) and (name in others or not self.tensors[name].requires_grad))
        ]
        for name, parts in self.parts.items():
            said += [f"{name}: {part} has no derived role" for part in parts if part not in PARTS]
        said += [f"{name}: {what}, what is multiplied is not one number" for name, what in self._find_unknown()]
        return [*said, *(each for each in self.trace.refused if "is not one number" not in each)] or self.unsized

    def _find_unknown(self) -> Iterator[tuple[str, str]]:
        """Find weights whose multiplier differs between terms; of fixed positions it may."""
        for kind, by_name in self.trace.scales.items():
            for name, number in by_name.items():
                if kind not in (*KINDS, *ALONE) or (kind == "position" and name not in self.parts):
                    continue
                if kind == "output" and "unembedding" not in self.parts.get(name, ()):
                    continue
                if math.isnan(number):
                    name = min(self.trace.cores[name].query.weights, default="attention") if kind == "logit" else name
                    yield name, WHERE.get(kind) or ALONE[kind]

    def architecture(self, base: TracedModel) -> Architecture:
        """Return the architecture, with what the forward pass multiplies relative to the base."""
        trace, heads, held = self.trace, self.roles.heads, {part for parts in self.parts.values() for part in parts}
        tied = any({"embedding", "unembedding"} <= set(parts) for parts in self.parts.values())
        ends = [
            name
            for name, parts in self.parts.items()
            if parts == ("final_gain",) and all(kind == "product" and x in heads for kind, x in trace.readers[name])
        ]
        reason = f"{len(ends)} norms are read by the tied read-out alone" if tied and len(ends) != 1 else ""
        if tied and trace.post_norm and "hidden" not in held:
            reason = "no norm of its own stands before it"
        shifts = {name: {each for kind, each in found if kind == "shift"} for name, found in trace.added.items()}
        ends += [name for name, gains in shifts.items() if gains & set(ends)]
        made: dict[bool, list[Parameter]] = {True: [], False: []}
        for name, parts in self.parts.items():
            both = {"embedding", "unembedding"} <= set(parts)
            start = base.starts.get(name, base.starts.get(join_layers(name), 1.0))
            if parts:
                closes, offset = tied and not reason and name in ends, trace.offsets.get(name, 0.0)
                value, axes = None if start == 1 else start, self.tensors[name].dim()
                parameter = Parameter(name, ("embedding",) if both else parts, both, closes, offset, value, axes)
                made[self.tensors[name].requires_grad].append(parameter)
        branches = [each for some in trace.writes.values() for each in some]
        eaten = {"logit"} if any(core.query.normed for core in trace.cores) and "query_gain" not in held else set()
        eaten |= {"branch"} if any(each.normed and not each.gains for each in branches) else set()
        assert self.shape is not None
        facts: dict[str, Any] = {"forward": self.forward(base), "normed": frozenset(eaten)}
        facts |= {"post_norm": trace.post_norm, "open_end": reason}
        return Architecture(self.shape, tuple(made[True]), frozen=tuple(made[False]), **facts)


def refuse(reasons: Iterable[str]) -> None:
    """Refuse a model for all reasons at once; those of repeated layers once."""
    if found := list({re.sub(r"\d+", "#", each): each for each in reversed(list(reasons))}.values())[::-1]:
        said = found[0] if len(found) == 1 else "; ".join(f"({n}) {each}" for n, each in enumerate(found, 1))
        raise UsageError(f"roles are not inferred: {said}")


def _same(some: list[float], others: list[float]) -> bool:
    """Whether two lists hold the same numbers."""
    pairs = ((some, others), (others, some))
    return all(any(math.isclose(x, y, rel_tol=1e-6) for y in right) for left, right in pairs for x in left)


def _list(numbers: Iterable[float]) -> str:
    return ", ".join(f"{each:.6g}" for each in sorted(numbers))


def trace_model(model: Any, example: Any = None) -> tuple[dict[str, Tensor], Trace]:
    """Return the parameters of a model by name, wrappers left out, and the trace of one forward pass."""
    tensors = name_parameters(model)
    if meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise UsageError(
            f"{meta[0]} is on the device meta: build the model on a device that holds numbers; or give the roles of a "
            "small one as patterns of names, the shape, and folded=ForwardMultipliers(...)"
        )
    failed = []
    with _unchanged(model):
        for arguments, named in _examples(model, example):
            try:
                return tensors, trace_module(model, arguments, named)
            except UsageError:
                raise
            except Exception as error:  # whatever a model raises for a batch that it does not take
                failed.append(error)
    said = f"{type(failed[0]).__name__}: {str(failed[0]).partition(chr(10))[0][:150]}"
    wanted = "give example=, arguments that the model takes, with two different sequences"
    raise UsageError(f"the forward pass did not run ({said}): {wanted}") from failed[0]


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Restore the random states and the buffers of a model."""
    kept = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(each, each.clone()) for _, some in kept for each in some.values() if each is not None]
    with torch.random.fork_rng():
        yield
    with torch.no_grad():
        for module, some in kept:
            module._buffers.update(some)
        for buffer, value in values:
            buffer.copy_(value)


def _examples(model: Any, example: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield arguments of a forward pass; if none are given, two sequences of token ids, fewer ids, or two images."""
    given = example(model) if callable(example) and not isinstance(example, torch.Tensor) else example
    first, config = next(model.parameters()), getattr(model, "config", None)
    if isinstance(given, Mapping):
        yield (), dict(given)
    elif given is not None:
        yield (tuple(given) if isinstance(given, tuple | list) else (given,)), {}
    elif getattr(model, "main_input_name", "") == "pixel_values" and config and hasattr(config, "image_size"):
        sides = 2, config.num_channels, config.image_size, config.image_size
        yield (torch.randn(sides, generator=torch.Generator().manual_seed(0)).to(first),), {}
    else:
        yield ((2 + torch.arange(2 * TOKENS, device=first.device).reshape(2, TOKENS)),), {}
        rows = min([len(tensor) for tensor in model.parameters() if tensor.dim() == 2], default=2)
        ids = torch.arange(FEWER, device=first.device)
        yield (torch.stack([ids, ids + 1]) % rows,), {}

"""Parts of parameters, in the words of `manyheads.models.parts`, from the trace of a forward pass."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from manyheads.models.infer.trace import Trace
from manyheads.models.infer.values import Product, Value
from manyheads.models.names import join_layers
from manyheads.models.parts import LATENT

BRANCH = dict.fromkeys(("query", "key", "value", "output", "query_down", "key_value_down"), "attention")
BRANCH |= dict.fromkeys(("mlp_in", "mlp_gate", "router"), "mlp") | dict.fromkeys(("unembedding", "hidden"), "final")
BRANCH |= dict.fromkeys(("query_up", "key_value_up", "mlp_out"), "inner")
READS_STREAM = {"query", "key", "value", "query_down", "key_value_down", "mlp_in", "mlp_gate", "router"}
SHARED, UNUSED = "shared layers are not derived", "not used in the traced forward pass"
"""In reasons why a parameter has no part: it may have the one that its name says."""
READ = ("an input", "the stream", "another weight", "attention")
ADAPTER = "a product of low rank beside a full matrix (an adapter) has no role; give a role map"
ORDER = ("query", "key", "value", "mlp_gate", "mlp_in")


def find_blocks(names: Iterable[str], deeper: Iterable[str]) -> frozenset[str]:
    """Return joined names of which a deeper model has more: what stands in the blocks."""
    few, many = Counter(map(join_layers, names)), Counter(map(join_layers, deeper))
    return frozenset(name for name in many if many[name] > few[name])


class Roles:
    """Parts by parameter, and why there is none."""

    def __init__(self, trace: Trace, names: Collection[str], inside: frozenset[str]) -> None:
        self.trace, self.inside = trace, inside
        self.parts: dict[str, list[str]] = {name: [] for name in names}
        self.why: dict[str, str] = {}  # empty where it is another parameter's
        self.uses: dict[str, list[Product]] = defaultdict(list)
        self.read_by: dict[str, set[str]] = defaultdict(set)  # weight → weights that read it
        for product in trace.products:
            self.uses[product.weight].append(product)
            for each in product.x.weights:
                self.read_by[each].add(product.weight)
        self.level = {name: max(trace.level(each.x) for each in some) for name, some in self.uses.items()}
        self.refuse_several()
        self.heads = sorted(frozenset().union(*(each.weights for each in trace.outputs)))
        for table, kinds in trace.tables.items():
            self.give(table, next(each for each in ("sink", "embedding", "patch", "positional") if each in kinds))
        self.read_attention()
        self.read_matrices()
        for gain in trace.gains:
            self.read_gain(gain)
        for name, found in trace.added.items():
            self.read_added(name, dict.fromkeys(found))
        for name, parts in self.parts.items():
            if not parts:
                reason = f"{UNUSED}; freeze it, remove it, or give an example that uses it"
                self.why.setdefault(name, reason)
            parts.sort(key=lambda each: ORDER.index(bare) if (bare := each.removesuffix("_bias")) in ORDER else 9)

    def give(self, name: str, part: str) -> None:
        """Give a parameter a part."""
        if part not in self.parts[name]:
            self.parts[name].append(part)

    def refuse(self, name: str, reason: str) -> None:
        """Keep the first reason why a parameter has no part."""
        self.why.setdefault(name, reason)

    def inputs(self, weight: str) -> list[str]:
        """Return the weights that a weight reads."""
        return sorted(frozenset().union(*(each.x.weights for each in self.uses[weight])))

    def refuse_several(self) -> None:
        """Refuse weights that read different things, by one slice or within an MLP."""
        for weight, some in self.uses.items():
            levels: dict[object, set[int]] = defaultdict(set)
            for each in some:
                levels[each.part].add(self.trace.level(each.x))
            every = set[int]().union(*levels.values())
            if {1, 2} <= every or max(map(len, levels.values())) > 1:
                what = " and ".join(READ[level] for level in sorted(every))
                self.refuse(weight, f"it reads {what}: the sum of these gradients is not derived")

    # Attention

    def read_attention(self) -> None:
        """Name the weights of the queries, keys and values of every core."""
        users: dict[str, set[int]] = defaultdict(set)
        slices: dict[str, set[object]] = defaultdict(set)
        for number, core in enumerate(self.trace.cores):
            sides = {"query": core.query, "key": core.key, "value": core.value}
            if core.query.starts and core.key.starts and not core.query.starts & core.key.starts:
                for name in sorted(core.query.weights):
                    self.refuse(name, "cross-attention: queries and keys read different streams")
            for side, value in sides.items():
                self.refuse_mixed(side, value, sides)
                for source in value.sources:
                    users[source.name].add(number)
                    slices[source.name].add(source.part)
                for name in sorted(value.weights):
                    latents = self.inputs(name) if self.level[name] == 2 else []
                    if not latents:
                        self.give(name, side)
                        continue
                    if any(each.bent for product in self.uses[name] for each in product.x.sources):
                        self.refuse(name, f"a nonlinearity stands between two matrices of the {side} of attention")
                    kind = "query" if name not in core.key.weights | core.value.weights else "key_value"
                    self.give(name, f"{kind}_up")
                    for latent in latents:
                        self.give(latent, f"{kind}_down")
                        users[latent].add(number)
                        slices[latent] |= {each.part for each in self.uses[latent]}
        for name, parts in self.parts.items():  # a latent beside keys of one head with positions is one matrix
            self.parts[name] = [each for each in parts if each in LATENT] or parts
        for name, cores in users.items():
            if name in self.parts and len(cores) > len(slices[name]):
                self.refuse(name, f"one weight serves {len(cores)} attention layers; {SHARED}")

    def refuse_mixed(self, side: str, value: Value, sides: dict[str, Value]) -> None:
        """Refuse sides of a core that are no plain product of weights."""
        deep = [name for name in sorted(value.weights) if self.level[name] == 2]
        below = {each for name in deep for each in self.inputs(name)}
        if deep and any(self.level[name] == 1 for name in value.weights - below):
            self.refuse(deep[0], ADAPTER)
        strange = [each for each in value.sources if each.kind != "weight"]
        if strange or not value.weights:
            what = "an attention core" if value.core else "the stream"
            self.trace.refuse(f"{side} of attention is made of {what} without a weight of its own: this has no role")
        if bent := sorted(each.name for each in value.sources if side != "value" and each.name and each.bent):
            self.refuse(bent[0], f"a nonlinearity stands behind the {side} of attention: this has no derivation")
        for other, theirs in sides.items():
            shared = {each.name for each in value.plain() & theirs.plain() if self.level.get(each.name) in (1, 3)}
            if other > side and shared:
                reason = f"the same numbers are {side} and {other}; the sum of their gradients is not derived"
                self.refuse(min(shared), reason)

    # Matrices

    def read_matrices(self) -> None:
        """Name the output, the read-out, routers, and the matrices of the MLP."""
        trace = self.trace
        for weight, some in self.uses.items():
            if any(each.x.core for each in some):
                self.give(weight, "output")
                if beside := sorted(frozenset().union(*(each.x.weights for each in some)) - trace.routers):
                    self.refuse(weight, f"it reads attention beside {beside[0]}: their sum is not derived")
                if self.read_by[weight]:
                    adapts = self.adapts(weight)
                    self.refuse(weight, ADAPTER if adapts else "it reads an attention core and does not end the branch")
                if any(source.bent for each in some for source in each.x.sources if source.kind == "core"):
                    self.refuse(weight, "a nonlinearity on the output of attention has no derivation")
        for name in self.heads:
            if set(self.parts[name]) <= {"embedding"}:
                self.give(name, "unembedding")
        for name in sorted(trace.routers):
            if not self.parts[name]:
                self.give(name, "router")
        for weight in self.uses:
            if weight in trace.writes and self.level[weight] == 2 and set(self.parts[weight]) <= {"embedding"}:
                self.give(weight, "mlp_out")
        for weight in self.uses:
            if "attention" in trace.gated[weight]:
                self.refuse(weight, "a gate on the output of attention has no derived role")
            readers = self.read_by[weight]
            if any("mlp_out" in self.parts[each] for each in readers) and self.level[weight] == 1:
                kinds = trace.gated[weight] - {"attention"} or {"in"}
                for kind in sorted(kinds):
                    self.give(weight, f"mlp_{kind}")
            elif self.parts[weight]:
                continue
            elif readers and all(set(self.parts[each]) & {"unembedding", "embedding"} for each in readers):
                self.give(weight, "hidden")
            elif weight in trace.writes:
                self.refuse(weight, "one matrix alone between two points of the stream")
            else:
                below = READ[self.level[weight]]
                above = " and ".join(sorted(readers)) or "nothing"
                said = f"it reads {below} and is read by {above}: no part of a block does"
                lost = readers & self.why.keys()
                self.refuse(weight, ADAPTER if self.adapts(weight) else "" if lost else said)
        for weight, branches in trace.writes.items():
            written = {each.part for branch in branches for each in branch.sources if each.name == weight}
            if len(branches) > len(written):
                self.refuse(weight, f"one weight ends {len(branches)} branches; {SHARED}")
        widths = {name: some[0].fan_in for name, some in self.uses.items() if set(self.parts[name]) & READS_STREAM}
        widths = {name: size for name, size in widths.items() if self.level[name] == 1 and size}
        self.width = Counter(widths.values()).most_common(1)[0][0] if widths else None
        for name, size in widths.items():
            if size != self.width:
                self.refuse(name, f"it sums over {size} numbers, and the stream has {self.width}")

    def adapts(self, weight: str) -> bool:
        """Whether a weight that reads the same as this one is summed with one that reads this one."""
        reads = [{each.x.plain() for each in self.uses[name]} for name in (weight, *self.uses)]
        alike = {name for name, some in zip(self.uses, reads[1:], strict=True) if some == reads[0]} - {weight}
        values = [*(each.x for each in self.trace.products), *self.trace.outputs]
        values += [each for some in self.trace.writes.values() for each in some]
        return any(each.weights & alike and each.weights & self.read_by[weight] for each in values)

    def short(self, weight: str) -> str:
        """Return the first part of a weight; of a tied table, that of the read-out."""
        return ([each for each in self.parts[weight] if each != "embedding"] or self.parts[weight] or [""])[0]

    # Gains, shifts, biases and what else is added

    def read_gain(self, gain: str) -> None:
        """Name a gain by what reads it and where it stands."""
        found, before = self.trace.readers[gain], self.trace.gains[gain]
        kinds, x = {kind for kind, _ in found}, before[0]
        weights = [what for kind, what in found if kind == "product"]
        where = {BRANCH.get(self.short(name), "?") for name in weights}
        writes = {"attention" if any("output" in self.parts[each] for each in x.wrote) else "mlp"}
        if len({(each.part, each.wrote, each.starts) for each in before if each.stream}) > len(
            {each.part for each in before}
        ):
            self.refuse(gain, f"one norm serves several points of the stream; {SHARED}")
        if {"query", "key"} <= kinds:
            self.refuse(gain, "one gain of queries and keys: it has two roles")
            return
        if kinds & {"query", "key"} and not x.stream:
            if not all(each.normed for each in before):
                what = "a trained factor of queries or keys without a norm before it"
                self.refuse(gain, f"{what}: a temperature has no role")
            part = "query" if "query" in kinds else "key"
        elif x.stream and not x.wrote and "carried" in kinds:
            part = "embedding"
        elif "branch" in kinds:
            written = next(what for kind, what in found if kind == "branch")
            side = "attention" if any("output" in self.parts[each] for each in written) else "mlp"
            part = f"{side}_post" if x.normed else "branch"
        elif x.stream and ("carried" in kinds or (where == {"final"} and x.wrote and join_layers(gain) in self.inside)):
            (part,) = writes
        elif "output" in kinds or where == {"final"}:
            part = "final"
        elif not x.stream:
            part = "inner"
        elif "?" in where or not where or (len(where) > 1 and not where <= {"attention", "mlp"}):
            lost = any(name in self.why for name in weights)
            self.refuse(gain, "" if lost else f"a gain that is read by {', '.join(sorted(set(weights))) or 'nothing'}")
            return
        else:
            part = min(where)
        if part != "branch" and not all(each.normed for each in before):
            self.refuse(gain, "a trained factor without a norm before it has no role")
        self.give(gain, f"{part}_gain")

    def read_added(self, name: str, found: Iterable[tuple[str, str]]) -> None:
        """Name a parameter that is added: a shift, a bias, or one of its own."""
        for kind, beside in found:
            if kind == "unknown":
                self.refuse(name, "it is added to something that is neither stream, product, norm nor logits")
            elif kind not in ("shift", "bias"):
                self.give(name, kind if self.parts[name] != ["positional"] else "positional")
            elif not self.parts[beside]:
                self.refuse(name, "" if beside in self.why else f"it is added to {beside}, which has no role")
            elif kind == "shift":
                self.give(name, self.parts[beside][0].replace("_gain", "_shift"))
            else:
                tied = "unembedding" in self.parts[beside]  # as a product, a tied table is the read-out
                for part in self.parts[beside]:
                    if not (part == "embedding" and tied):
                        self.give(name, f"{'embedding' if part == 'patch' else part}_bias")

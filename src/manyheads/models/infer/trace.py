"""Trace of a forward pass: events among abstract values.

A front end runs a model and turns every operation into a method of `Trace`; `None` stands for a constant. Names of
parameters are labels here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from manyheads.models.infer.values import STREAM, UNKNOWN, Core, Product, Source, Value


@dataclass
class Trace:
    """Events of one forward pass."""

    products: list[Product] = field(default_factory=list)
    cores: list[Core] = field(default_factory=list)
    tables: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # → embedding, patch, positional
    starts: dict[int, str] = field(default_factory=dict)  # number of an embedding → parameter
    gains: dict[str, list[Value]] = field(default_factory=lambda: defaultdict(list))  # gain → what it multiplied
    offsets: dict[str, float] = field(default_factory=dict)
    readers: dict[str, list[tuple[str, Any]]] = field(default_factory=lambda: defaultdict(list))  # gain → what read it
    added: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))  # → kind, beside what
    writes: dict[str, list[Value]] = field(default_factory=lambda: defaultdict(list))  # weight → branches it ends
    gated: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # weight → gate, in, attention
    routers: set[str] = field(default_factory=set)
    outputs: list[Value] = field(default_factory=list)
    refused: dict[str, None] = field(default_factory=dict)
    scales: dict[str, dict[Any, float]] = field(default_factory=lambda: defaultdict(dict))
    """What is multiplied: kind (logit, branch, output, embedding, position, stream, inner) → where → number."""
    bent: dict[str, float] = field(default_factory=dict)  # weight → its scale before a nonlinearity that is no cap
    straight: dict[str, float] = field(default_factory=dict)  # weight → scale of x where x f(x) is a nonlinearity of it
    post_norm: bool = False  # whether a norm stands on a sum

    def refuse(self, reason: str) -> None:
        """Keep a reason for which the model has no roles."""
        self.refused[reason] = None

    def level(self, x: Value) -> int:
        """Return 0 for inputs, 1 for the stream, 2 for another weight, 3 for an attention core."""
        if x.core:
            return 3
        if x.stream or any(each.kind == "stream" for each in x.sources):
            return 1
        return 2 if x.weights - self.routers else 0

    def depth(self, x: Value) -> int:
        """Return the level of the deepest source."""
        levels = [self.level(each.x) for each in self.products if each.weight in x.weights]
        return max([0, 3 * x.core, *levels])

    def number(self, number: float, what: str) -> float:
        """Return a multiplier, and refuse one that is not one number."""
        if number != number:
            self.refuse(f"{what}: what is multiplied is not one number, the same for all entries and terms")
        return number

    def check_straight(self, x: Value) -> None:
        """Refuse a nonlinearity on the stream."""
        if any(each.kind == "stream" and each.bent for each in x.sources):
            self.refuse("a nonlinearity on the stream itself has no derivation")

    def one(self, p: Value) -> str:
        """Return the name of the one parameter of a value, and refuse what is computed of parameters."""
        names = sorted(p.parameters)
        if len(names) > 1:
            self.refuse(f"{' and '.join(names)} are combined before they meet an activation")
        elif p.computed:
            self.refuse(f"{names[0]}: something is computed of it before it meets an activation")
        return names[0]

    def note(self, gains: frozenset[str], kind: str, what: Any) -> None:
        """Say what reads gains."""
        for name in sorted(gains):
            self.readers[name].append((kind, what))

    # Products

    def begin(self, table: Value, kind: str, scale: float = 1.0) -> Value:
        """Begin a stream with the rows of a table, or with a product of inputs."""
        name, number = self.one(table), len(self.starts)
        self.tables[name].add(kind)
        self.starts[number] = name
        return Value(STREAM, True, frozenset([number]), last=("table", name), own=table.scale * scale)

    def product(self, a: Value | None, b: Value | None, size: int, width: int = 0, fixed: bool = False) -> Value | None:
        """Multiply matrices: sum over `size` numbers, to `width` of them.

        A constant factor holds one-hot rows, of positions if it is `fixed` for all sequences.
        """
        for p, x in ((a, b), (b, a)):
            if p is not None and p.parameters:
                if x is None:
                    return self.begin(p, "positional" if fixed else "embedding")
                if x.parameters:
                    return Value(parameters=p.parameters | x.parameters, computed=True)
                return self.weigh(p, x, size)
        if a is None or b is None:
            return a or b
        if a.pattern != b.pattern:
            pattern, value = (a, b) if a.pattern else (b, a)
            assert pattern.scores is not None
            if pattern.over != (-1 if a.pattern else -2):
                self.refuse("attention weights are not a softmax over the keys: this has no derivation")
            query, key = pattern.scores if pattern.axis == -1 else pattern.scores[::-1]
            return self.attend(Core(query, key, value, pattern.size, width or pattern.size), pattern)
        if a.scores or b.scores:
            self.refuse("a product of three activations without a softmax: linear attention")
            return self.bend(self.join(a, b))
        for gate, x in ((a, b), (b, a)):
            gates = gate.warped and not x.warped and gate.weights and self.depth(gate) < self.depth(x)
            if gate.chosen or gate.shares or gates:
                return self.weight(x, gate)
        own, taken = a.own * b.own, a.taken * b.taken
        return Value(a.sources | b.sources, scores=(a, b), size=size, own=own, taken=taken, starts=a.starts | b.starts)

    def weigh(self, p: Value, x: Value, fan_in: int) -> Value:
        """Multiply an activation by a weight."""
        name = self.one(p)
        if x.scores:
            self.refuse(f"{name} multiplies logits or patterns of attention: mixing heads is not derived")
        elif x.shares and not x.chosen:
            self.refuse(f"{name} reads numbers that sum to one, as behind a softmax: this has no derivation")
        self.check_straight(x)
        self.products.append(Product(name, p.part, x, fan_in))
        self.note(x.gains, "product", name)
        if self.level(x) == 0:
            return self.begin(p, "patch", x.scale)
        source, last = Source("weight", name, p.part), ("product", name)
        return Value(frozenset([source]), starts=x.starts, last=last, own=p.multiplier, taken=x.scale)

    def attend(self, core: Core, pattern: Value) -> Value:
        """Mix values by attention."""
        for side in ("query", "key", "value"):
            self.note(getattr(core, side).gains, side, len(self.cores))
            if side != "value" and any(each.bent for each in getattr(core, side).sources):
                self.refuse(f"a nonlinearity stands between the weights of a {side} and the logits")
        self.scales["logit"][len(self.cores)] = self.number(pattern.taken, "the logits")
        self.scales["sink"] |= {name: number * pattern.taken for name, number in pattern.beside}
        source = frozenset([Source("core", str(len(self.cores)))])
        self.cores.append(core)
        own, taken = core.value.own * pattern.own, core.value.taken
        return Value(source, starts=core.query.starts, last=("core", ""), own=own, taken=taken)

    # Sums

    def join(self, a: Value, b: Value) -> Value:
        """Sum, concatenate or choose elementwise."""
        every = "sources", "starts", "wrote", "gains", "beside", "shares", "warped", "weighted", "added"
        united = {name: getattr(a, name) | getattr(b, name) for name in every}
        shared = {name: getattr(a, name) and getattr(b, name) for name in ("stream", "normed", "statistic", "chosen")}
        numbers: dict[str, Any] = {"pattern": a.pattern or b.pattern}
        for name in ("own", "taken", "degree"):
            numbers[name] = getattr(a, name) if getattr(a, name) == getattr(b, name) else UNKNOWN
        last = a.last if a.last == b.last else None
        return replace(a if a.scores else b, **united, **shared, **numbers, last=last)

    def add(self, a: Value | None, b: Value | None, joined: str = "") -> Value | None:
        """Add, or concatenate or stack if `joined` says so."""
        if a is None or b is None:
            return a or b
        if a.parameters and b.parameters:
            return Value(parameters=a.parameters | b.parameters, computed=a.computed or b.computed)
        if a.parameters or b.parameters:
            return self.add_parameter(b, a, joined) if a.parameters else self.add_parameter(a, b, joined)
        if a.scores or b.scores:
            if a.scores and b.scores and a.scores != b.scores:
                self.refuse("logits or patterns are a sum of several products: terms of position have no derivation")
            x, other = (a, b) if a.scores else (b, a)
            if other.last and other.last[0] == "table":  # a looked-up bias of the logits
                self.tables[other.last[1]] = {"sink"}
                return replace(x, beside=x.beside | {(other.last[1], other.own / x.scale)})
            if not other.scores:
                self.refuse("an activation is added to the logits or patterns of attention: this has no derivation")
            return x
        if a.statistic != b.statistic:
            return b if a.statistic else a
        if a.stream and b.stream:
            if a.wrote != b.wrote and joined != "cat":
                both = " and ".join(", ".join(sorted(each.wrote)) or "embeddings" for each in (a, b))
                self.refuse(f"two points of the stream are added, behind {both}")
            if a.wrote or b.wrote:
                return self.join(a, b)
            self.embed(a)
            self.embed(b)
            return replace(self.join(a, b), own=1.0, taken=1.0, last=None)
        if a.stream == b.stream or joined:
            different = not joined and a.weights != b.weights
            return replace(made := self.join(a, b), added=made.added or different)
        return self.write(a, b) if a.stream else self.write(b, a)

    def embed(self, x: Value) -> None:
        """Multiply the embeddings that a stream began with."""
        own = self.number(x.own, "the embeddings")
        if x.normed and own != 1:
            self.refuse(f"embeddings are multiplied by {own:g} behind a norm: no table can carry this")
            own = UNKNOWN
        for number in x.starts:
            table = self.tables.get(self.starts[number], set()) & {"embedding", "patch"}
            found = self.scales["embedding" if table else "position"]
            found[self.starts[number]] = found.get(self.starts[number], 1.0) * own

    def write(self, stream: Value, branch: Value) -> Value:
        """Add a branch to the stream."""
        names = branch.weights - self.routers
        self.check_straight(stream)
        if branch.warped and names:
            self.refuse(f"a nonlinearity or a product stands between {', '.join(sorted(names))} and the stream")
            branch = replace(branch, own=UNKNOWN)
        elif names:
            self.number(branch.scale, "what a branch adds to the stream")
        if branch.core or not names:
            self.refuse(f"{'an attention core' if branch.core else 'a value'} is added to the stream without a matrix")
        if not stream.wrote:
            self.embed(stream)
        else:
            self.post_norm |= stream.normed
            self.scales["stream"] |= dict.fromkeys(names, stream.own)
            if stream.own != 1:
                self.refuse(f"the stream is multiplied by {stream.own:g} between blocks")
        for name in sorted(names):
            self.writes[name].append(branch)
            self.scales["branch"].setdefault(name, branch.scale)
            if self.scales["branch"][name] != branch.scale:
                self.scales["branch"][name] = UNKNOWN
        self.note(stream.gains, "carried", names)
        self.note(branch.gains, "branch", names)
        return Value(STREAM, stream=True, starts=stream.starts | branch.starts, wrote=names)

    def add_parameter(self, x: Value, p: Value, joined: str = "") -> Value | None:
        """Add a parameter, or append it."""
        kind, beside = "bias", ""
        last, about = x.last or ("", "")
        if x.scores:
            kind = "sink"
        elif joined:
            kind = "marker" if x.stream and not x.wrote else "unknown"
        elif last == "gain":
            kind, beside = "shift", about
        elif last == "product":
            beside = about
        elif x.stream:
            kind = "positional" if not x.wrote else "unknown"
        elif len(x.weights) == 1 and not x.statistic:
            (beside,) = x.weights
        else:
            kind = "unknown"
        for name in sorted(p.parameters):
            if p.computed:
                self.one(replace(p, parameters=frozenset([name])))
            self.added[name].append((kind, beside))
            if kind == "bias":
                self.scales["bias"][name] = p.scale / x.own
        if kind == "positional":
            return self.add(x, self.begin(p, kind))
        if kind == "marker":
            self.starts[number := len(self.starts)] = name
            return self.add(x, Value(STREAM, True, frozenset([number]), own=p.scale), joined)
        x = replace(x, beside=x.beside | {(name, p.scale / (x.scale if x.scores else x.own)) for name in p.parameters})
        return x if x.scores else replace(x, last=None)

    # Elementwise products and functions

    def multiply(self, a: Value | None, b: Value | None) -> Value | None:
        """Multiply elementwise."""
        if a is None or b is None:
            return a or b
        if a.parameters and b.parameters:
            return Value(parameters=a.parameters | b.parameters, computed=True)
        if a.parameters or b.parameters:
            return self.gain(b, a) if a.parameters else self.gain(a, b)
        if a.statistic != b.statistic:
            x, statistic = (b, a) if a.statistic else (a, b)
            if x.scores and not x.pattern:
                self.refuse("logits are normalized before their softmax: this has no derivation")
            if x.scores:
                return replace(x, over=statistic.over if statistic.degree == -1 else x.over)
            own = x.scale * statistic.scale
            if statistic.degree != -1 or x.plain() != statistic.plain() or x.wrote != statistic.wrote or own != own:
                self.refuse("an activation is multiplied by a sum over features that does not make it a norm")
                own = UNKNOWN
            for name in x.gains - statistic.gains:  # w x / |x| is a gain behind the norm
                self.gains[name] = [replace(each, normed=True) for each in self.gains[name]]
            return replace(x, normed=True, own=own, taken=1.0, shares=x.shares or statistic.shares)
        if a.scores or b.scores:
            if not (a.scores and b.scores):
                self.refuse("logits or patterns are multiplied by an activation: this has no derivation")
            x = a if a.scores else b
            return x if x.pattern else self.bend(x)
        if a.chosen != b.chosen:
            return self.weight(b, a) if a.chosen else self.weight(a, b)
        both = replace(self.join(a, b), own=a.own * b.own, taken=a.taken * b.taken)
        if a.sources and a.plain() == b.plain():  # x f(x) is a nonlinearity
            first, second = (any(each.bent for each in side.sources) for side in (a, b))
            for name in a.weights if not (first or second) else ():
                self.bent.setdefault(name, max(a.scale, b.scale))
            if first != second:
                self.straight |= dict.fromkeys(a.weights, both.scale)
                return self.bend(both)
            degree = 2 * (a.degree if a.statistic else 1)
            return replace(self.bend(both), own=both.own, taken=both.taken, degree=degree)
        if self.depth(a) != self.depth(b):  # a branch times what reads the stream: a gate of the whole branch
            return self.weight(a, b) if self.depth(a) > self.depth(b) else self.weight(b, a)
        if a.shares or b.shares:
            self.refuse("hidden units are multiplied by numbers that sum to one, as a softmax: this has no derivation")
        for one, other in ((a, b), (b, a)):
            bent = {each.name for each in one.sources if each.kind == "weight" and each.bent}
            straight = {each.name for each in other.sources if each.kind == "weight" and not each.bent}
            for name in bent if straight else ():
                self.gated[name].add("gate")
            for name in straight if bent else ():
                self.gated[name].add("in")
        return replace(both.curved(), warped=True)

    def weight(self, x: Value, gate: Value) -> Value:
        """Multiply a whole branch by a gate or a router."""
        if x.core:
            for name in gate.weights:
                self.gated[name].add("attention")
        elif gate.chosen and any(each.x.core for each in self.products if each.weight in x.weights):
            self.refuse("a router weights the output of attention: heads chosen by data are not derived")
        self.routers |= gate.weights if not x.core else set()
        if not gate.weights:
            self.refuse("a branch is multiplied by an activation that no weight makes: this has no role")
        known = gate.weights and not x.core
        self.scales["gate"] |= dict.fromkeys(x.weights, self.number(gate.scale, "a gate"))
        return replace(x, own=x.own if known else UNKNOWN, weighted=True)

    def gain(self, x: Value, p: Value) -> Value:
        """Multiply by a parameter."""
        name = self.one(p)
        if x.scores:
            self.refuse(f"{name} multiplies logits or patterns: a temperature has no role")
        self.gains[name].append(replace(x, part=p.part))
        self.offsets[name] = p.offset
        return replace(x, gains=x.gains | {name}, last=("gain", name), own=x.own * p.multiplier)

    def norm(self, x: Value | None, gain: Value | None, shift: Value | None) -> Value | None:
        """Normalize, then multiply by a gain and add a shift."""
        if x is None:
            return None
        self.check_straight(x)
        x = replace(x, normed=True, own=1.0, taken=1.0)
        x = self.gain(x, gain) if gain is not None and gain.parameters else x
        return self.add_parameter(x, shift) if shift is not None and shift.parameters else x

    def bend(self, x: Value, keep: bool = False) -> Value:
        """Apply a nonlinearity; a cap keeps the multiplier of what it caps."""
        if x.parameters:
            return replace(x, computed=True)
        for name in x.weights if not (x.scores or x.stream or x.statistic) else ():
            if name not in self.scales["inner"]:
                self.scales["inner"][name] = self.number(x.scale, f"{name}, before a nonlinearity,")
            if not keep:
                self.bent.setdefault(name, x.scale)
        keep = (keep and x.scale == x.scale) or x.statistic or x.scores is not None
        own, taken = (x.own, x.taken) if keep else (1.0, 1.0)
        return replace(x.curved(), own=UNKNOWN if x.core else own, taken=taken, warped=True)

    def power(self, x: Value, exponent: float) -> Value:
        """Raise to a power: a nonlinearity of which the multiplier is known."""
        own, taken, degree = abs(x.own) ** exponent, abs(x.taken) ** exponent, x.degree if x.statistic else 1.0
        made = self.bend(x)
        return made if x.parameters else replace(made, own=own, taken=taken, degree=degree * exponent)

    def exponential(self, x: Value, over: int = 0) -> Value:
        """Apply exp, or softmax over an axis: of scores it makes attention weights."""
        if x.scores and not x.parameters:
            return replace(x, pattern=True, over=over, own=1.0, taken=x.scale)
        return replace(self.bend(x), shares=over != 0)

    def choose(self, x: Value) -> Value:
        """Sort, or take the largest: what is sorted comes from a router."""
        if x.parameters or x.stream or x.scores:
            return x
        self.routers |= x.weights
        return replace(x, chosen=True)

    def scaled(self, x: Value, number: float) -> Value:
        """Multiply by a constant."""
        return replace(x, own=x.own * number, offset=x.offset * number)

    def output(self, x: Value | None) -> None:
        """End with a value that the model returns."""
        if x is not None:
            self.outputs.append(x)
            if x.added and len(x.weights) > 1:
                self.refuse(f"the outputs are a sum of products with {' and '.join(sorted(x.weights))}: no derivation")
            for name in sorted(x.weights):
                number = self.number(self.bent.get(name, x.scale), f"the output of {name}")
                self.scales["output"][name] = number
                self.scales["inner"].pop(name, None)
                self.scales["bias"] |= {bias: ratio * number / x.taken for bias, ratio in x.beside}
            self.note(x.gains, "output", "")

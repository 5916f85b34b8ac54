"""A GPT in plain PyTorch as people write it, in many variants, with a factor planted anywhere in its forward pass."""

from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn import functional

from manyheads.errors import UsageError
from manyheads.scaling import BaseHyperparameters, Parametrization, audit_model, initialize_model, torch_groups
from manyheads.transformer import Shape

BASE = Shape(8, 4, 2)
SHAPES = [Shape(*sizes) for sizes in ((8, 12, 2), (16, 4, 2), (8, 4, 3), (16, 6, 2), (24, 4, 3), (8, 2, 2), (4, 6, 2))]
MATRICES = ("embedding", "positional", "query", "key", "value", "output", "mlp_in", "mlp_out", "unembedding")
TUNED = BaseHyperparameters(1e-3, weight_decay=0.1, no_decay=("norm", "final_norm"), stds=dict.fromkeys(MATRICES, 0.1))
ACTIVATIONS = {
    "gelu": functional.gelu,
    "tanh gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
    "squared relu": lambda x: functional.relu(x).square(),
}


@dataclass(frozen=True)
class Variant:
    """How the GPT is written."""

    qkv: str = "apart"  # or fused, grouped, parameters
    positions: str = "learned"  # or rotary, fixed, none
    norm: str = "layer"  # or rms, bare (without gains), custom
    activation: str = "gelu"
    gated: str = ""  # apart or fused
    qk_norm: bool = False
    order: str = "BHTN"  # or BTHN: where tokens stand while attention is computed
    fast: bool = True  # scaled_dot_product_attention, or a softmax
    tied: bool = False
    parallel: bool = False  # attention and MLP beside each other
    bias: bool = False
    sub_norm: bool = False  # norms in front of W_O and of the MLP's second matrix
    constants: dict = field(default_factory=dict)  # place → a number that is the same at every shape


PLACES = {
    "values": "behind the values",
    "value weight": "within the module that makes values",
    "mixed": "on the output of attention in front of W_O",
    "hidden": "on the hidden units of the MLP",
    "before activation": "in front of the activation",
    "up weight": "within the module that makes hidden units",
    "sub norm": "behind a norm in front of W_O",
    "attention norm": "behind the norm of attention",
    "value input": "behind that norm, for values alone",
    "query input": "behind that norm, for queries alone",
    "mlp norm": "behind the norm of the MLP",
    "within norm": "within the modules of the norms",
    "final norm": "within the module of the last norm",
    "stream": "on the stream between two blocks",
    "below": "on the stream below the first block",
    "positions": "on the positions",
    "embeddings": "on the embeddings",
    "logits": "on the logits",
    "qk norm": "within the norms of queries and keys",
    "branch": "on what attention adds to the stream",
    "outputs": "on the outputs",
}


def applies(place, variant):
    """Whether a variant has a place."""
    if variant.sub_norm and place in ("values", "value weight", "value input", "mixed", "hidden"):
        return False  # the norm takes the factor away
    return {
        "sub norm": variant.sub_norm,
        "value input": variant.qkv == "apart",
        "query input": variant.qkv == "apart" and not variant.qk_norm,
        "value weight": variant.qkv == "apart",
        "within norm": variant.norm == "custom",
        "final norm": variant.norm == "custom",
        "positions": variant.positions == "learned",
        "qk norm": variant.qk_norm,
        "before activation": not variant.sub_norm,
        "up weight": not variant.sub_norm,
    }.get(place, True)


class Scaled(nn.Linear):
    """A projection that multiplies by a number of its own."""

    def __init__(self, inputs, outputs, bias, factor):
        super().__init__(inputs, outputs, bias=bias)
        self.factor = factor

    def forward(self, x):
        return super().forward(x) * self.factor


class Norm(nn.Module):
    """RMSNorm as people write it, with a number of its own."""

    def __init__(self, width, factor=1.0):
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(width)), factor

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.factor


class Bare(nn.Module):
    """RMSNorm without a gain."""

    def forward(self, x):
        return functional.rms_norm(x, (x.shape[-1],), eps=1e-6)


def rotate(x, axis):
    """Rotate queries or keys by their position on an axis."""
    tokens, n = x.shape[axis], x.shape[-1]
    angles = torch.arange(tokens)[:, None] * 100.0 ** (-torch.arange(n // 2) / (n // 2))
    shape = [1] * x.dim()
    shape[axis], shape[-1] = tokens, n // 2
    sine, cosine = angles.sin().reshape(shape), angles.cos().reshape(shape)
    one, other = x.chunk(2, -1)
    return torch.cat([one * cosine - other * sine, one * sine + other * cosine], -1)


class Block(nn.Module):
    """One block."""

    def __init__(self, shape, v, factor):
        super().__init__()
        d, h, n = shape.width, shape.heads, shape.key_dim
        k = h // 2 if v.qkv == "grouped" else h
        self.shape, self.v, self.factor, self.groups = shape, v, factor, k
        self.attention_norm, self.mlp_norm = (make_norm(d, v, factor("within norm")) for _ in range(2))
        if v.qkv == "fused":
            self.c_attn = Scaled(d, 3 * d, v.bias, factor("value weight"))
        elif v.qkv == "parameters":
            self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(d, h, n) * d**-0.5) for _ in range(3))
        else:
            self.q, self.k = nn.Linear(d, d, bias=v.bias), nn.Linear(d, k * n, bias=v.bias)
            self.v_proj = Scaled(d, k * n, v.bias, factor("value weight"))
        if v.qk_norm:
            self.q_norm, self.k_norm = (Norm(n, factor("qk norm")) for _ in range(2))
        self.o, f = nn.Linear(d, d, bias=v.bias), 3 * d
        self.sub_norm, self.down_norm = (Norm(d), Norm(f)) if v.sub_norm else (nn.Identity(), nn.Identity())
        self.up = Scaled(d, f * (2 if v.gated == "fused" else 1), v.bias, factor("up weight"))
        if v.gated == "apart":
            self.gate = nn.Linear(d, f, bias=v.bias)
        self.down = nn.Linear(f, d, bias=v.bias)

    def project(self, z):
        """Return queries, keys and values, (B, T, H, N)."""
        n, v, factor = self.shape.key_dim, self.v, self.factor
        if v.qkv == "parameters":
            return [torch.einsum("btd,dhn->bthn", z, each) for each in (self.wq, self.wk, self.wv)]
        if v.qkv == "fused":
            parts = self.c_attn(z).chunk(3, -1)
        else:
            parts = self.q(z * factor("query input")), self.k(z), self.v_proj(z * factor("value input"))
        return [each.unflatten(-1, (-1, n)) for each in parts]

    def attend(self, z):
        """Return what attention adds to the stream."""
        shape, v, factor = self.shape, self.v, self.factor
        q, k, values = self.project(z)
        values = values * factor("values")
        if v.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if v.order == "BHTN":
            q, k, values = (each.transpose(1, 2) for each in (q, k, values))
        if v.positions == "rotary":
            axis = 2 if v.order == "BHTN" else 1
            q, k = rotate(q, axis), rotate(k, axis)
        times = shape.heads // self.groups
        head = 1 if v.order == "BHTN" else 2
        k, values = (each.repeat_interleave(times, head) for each in (k, values))
        q = q * factor("logits")
        if v.order == "BHTN" and v.fast:
            mixed = functional.scaled_dot_product_attention(q, k, values, is_causal=True)
        else:
            sums = "bhin,bhjn->bhij" if v.order == "BHTN" else "bihn,bjhn->bhij"
            logits = torch.einsum(sums, q, k) * shape.key_dim**-0.5
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
            weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
            mixed = torch.einsum("bhij,bhjn->bhin" if v.order == "BHTN" else "bhij,bjhn->bihn", weights, values)
        mixed = (mixed.transpose(1, 2) if v.order == "BHTN" else mixed).flatten(2)
        return self.o(self.sub_norm(mixed * factor("mixed")) * factor("sub norm"))

    def mlp(self, z):
        """Return what the MLP adds to the stream."""
        v, factor, f = self.v, self.factor, ACTIVATIONS[self.v.activation]
        up = self.up(z)
        if v.gated:
            gate, up = up.chunk(2, -1) if v.gated == "fused" else (self.gate(z), up)
            hidden = f(gate * factor("before activation")) * up
        else:
            hidden = f(up * factor("before activation"))
        return self.down(self.down_norm(hidden * factor("hidden")))

    def forward(self, x):
        factor = self.factor
        attended = self.attend(self.attention_norm(x) * factor("attention norm")) * factor("branch")
        if self.v.parallel:
            return x + attended + self.mlp(self.mlp_norm(x) * factor("mlp norm"))
        x = x + attended
        return x + self.mlp(self.mlp_norm(x) * factor("mlp norm"))


def make_norm(width, v, factor=1.0):
    """Return a norm of the stream."""
    if v.norm == "custom":
        return Norm(width, factor)
    return {"layer": lambda: nn.LayerNorm(width), "rms": lambda: nn.RMSNorm(width, eps=1e-6), "bare": Bare}[v.norm]()


class GPT(nn.Module):
    """Embedding, blocks, read-out; `planted` has the factor of each place."""

    def __init__(self, shape, v=None, planted=None):
        super().__init__()
        torch.set_num_threads(1)
        v = v or Variant()
        factors = {**v.constants, **(planted or {})}
        self.v, self.factor = v, lambda place: factors.get(place, 1.0)
        d = shape.width
        self.wte, self.head = nn.Embedding(17, d), nn.Linear(d, 17, bias=False)
        if v.tied:
            self.head.weight = self.wte.weight
        if v.positions == "learned":
            self.wpe = nn.Embedding(9, d)
        elif v.positions == "fixed":
            angles = torch.arange(9)[:, None] * 100.0 ** (-torch.arange(d // 2) / (d // 2))
            self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], -1))
        self.h = nn.ModuleList(Block(shape, v, self.factor) for _ in range(shape.depth))
        self.ln_f = make_norm(d, replace(v, norm="rms" if v.norm == "bare" else v.norm), self.factor("final norm"))

    def forward(self, tokens):
        factor, length = self.factor, tokens.shape[1]
        x = self.wte(tokens) * factor("embeddings")
        if self.v.positions == "learned":
            x = x + self.wpe(torch.arange(length)) * factor("positions")
        elif self.v.positions == "fixed":
            x = x + self.table[:length]
        x = x * factor("below")
        for number, block in enumerate(self.h):
            x = block(x * (factor("stream") if number else 1.0))
        return self.head(self.ln_f(x)) * factor("outputs")


PARTS = {"wte": "embedding", "wpe": "positional", "head": "unembedding", "ln_f": "final", "q": "query", "k": "key"}
PARTS |= {"v_proj": "value", "wq": "query", "wk": "key", "wv": "value", "o": "output", "up": "mlp_in"}
PARTS |= {"gate": "mlp_gate", "down": "mlp_out", "attention_norm": "attention", "mlp_norm": "mlp"}
PARTS |= {"q_norm": "query", "k_norm": "key", "sub_norm": "inner", "down_norm": "inner"}
FUSED = {"c_attn": ("query", "key", "value"), "up": ("mlp_gate", "mlp_in")}


def roles_of(model):
    """Return the role map of a GPT."""
    found = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        *path, end = name.split(".")
        place = end if end in PARTS else path[-1]
        whole = place in FUSED and (place != "up" or model.v.gated == "fused")
        suffix = "_bias" if end == "bias" else ""
        if "norm" in place or place == "ln_f":
            suffix = "_shift" if end == "bias" else "_gain"
        found[name] = "+".join(part + suffix for part in (FUSED[place] if whole else (PARTS[place],)))
    return found


def draw_variant(rng):
    """Draw a way to write a GPT."""
    qkv = str(rng.choice(["apart", "fused", "grouped", "parameters"]))
    return Variant(
        qkv=qkv,
        positions=str(rng.choice(["learned", "rotary", "fixed", "none"])),
        norm=str(rng.choice(["layer", "rms", "bare", "custom"])),
        activation=str(rng.choice(list(ACTIVATIONS))),
        gated=str(rng.choice(["", "apart", "fused"])),
        qk_norm=bool(rng.integers(2)) and qkv != "fused",
        order=str(rng.choice(["BHTN", "BTHN"])),
        fast=bool(rng.integers(2)),
        tied=bool(rng.integers(2)),
        parallel=bool(rng.integers(4) == 0),
        bias=bool(rng.integers(2)),
        sub_norm=bool(rng.integers(6) == 0),
    )


def fits(variant, shape):
    """Whether a variant can be scaled to a shape without more: fused queries do not carry the factor of the logits."""
    return variant.qkv != "fused" or shape.key_dim == BASE.key_dim


def draw_fault(rng):
    """Draw a variant, a shape, a place, a power of a size that differs from the base's, and its words."""
    while True:
        variant, shape, place = draw_variant(rng), SHAPES[rng.integers(len(SHAPES))], str(rng.choice(list(PLACES)))
        if fits(variant, shape) and applies(place, variant):
            break
    sizes = {"N": (shape.key_dim, BASE.key_dim), "H": (shape.heads, BASE.heads), "L": (shape.depth, BASE.depth)}
    moved = [letter for letter, (here, base) in sizes.items() if here != base]
    if place in ("logits", "qk norm") and "N" in moved:  # the parametrization asks for a power of N there
        return draw_fault(rng)
    letter = str(rng.choice(moved))
    exponent, relative = float(rng.choice([-1, -0.5, 0.5])), bool(rng.integers(2))
    here, base = sizes[letter]
    return variant, shape, place, (here / base if relative else here) ** exponent, f"{letter}^{exponent:g}"


def draw_clean(rng):
    """Draw a variant and a shape, sometimes with numbers that are the same at every shape."""
    while not fits(variant := draw_variant(rng), shape := SHAPES[rng.integers(len(SHAPES))]):
        continue
    places = ("values", "mixed", "hidden", "before activation")
    places = [place for place in places if rng.integers(6) == 0 and applies(place, variant) and not variant.sub_norm]
    return replace(variant, constants={place: float(rng.uniform(0.3, 3)) for place in places}), shape


def judge(variant, shape, planted=None, p=None):
    """Audit a GPT with right groups and weights; return refused, wrong, noted or passed, and what was said."""
    p, model = p or Parametrization(base=BASE), GPT(shape, variant, planted)
    roles = roles_of(model)
    try:
        initialize_model(p, model, TUNED, roles, shape, generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.AdamW(torch_groups(p, model, TUNED, roles, shape))
        audit = audit_model(p, model, optimizer, TUNED, roles, shape)
    except UsageError as error:
        return "refused", str(error)
    notes = [note for note in audit.notes if "not judged" in note]
    return "wrong" if audit.faults else "noted" if notes else "passed", "\n".join(notes)

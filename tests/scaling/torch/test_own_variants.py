"""Own GPTs with the usual names and another wiring: rows as derived by hand, a note, or a refusal.

The rates of Adam at logit exponent 1, for widths d0 and d: matrices d0/d, tables, gains and biases 1; what writes to
the stream L0/L times that; queries (N/N0)^-1/2 times that; behind a tied table the last norm d0/d.
"""

import math
import re

import pytest
from tests.scaling.own_models import TORCHTITAN, build, role_map

from manyheads.errors import UsageError
from manyheads.scaling import BaseHyperparameters, MuonHyperparameters, Parametrization, audit_model, torch_groups
from manyheads.transformer import Shape

nanogpt = pytest.importorskip("tests.scaling.nanogpt", reason="torch is not installed")
pytestmark = pytest.mark.torch

SHAPE = (8, 4, 3)
WIDE, DEEP, KEYS = (8, 2, 3), (8, 4, 1), (4, 4, 3)  # bases, and so what grows
TUNED = BaseHyperparameters(1.0)
MAP = r"\nroles = \{\n"


def nano(**methods):
    """Return a nanoGPT whose modules have other forward passes: `Block=`, `CausalSelfAttention=`, `GPT=`, `MLP=`."""
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 32}
    model = nanogpt.GPT(nanogpt.GPTConfig(block_size=16, vocab_size=31, dropout=0.0, bias=False, **sizes))
    for module in model.modules():
        if (own := methods.get(type(module).__name__)) is not None:
            module.__class__ = type(type(module).__name__, (type(module),), {"forward": own})
    return model


def untied(model):
    import torch

    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def derived(names, base, tied):
    """Return the factors of all learning rates, by hand."""
    (N0, H0, L0), (N, H, L) = base, SHAPE
    found = {}
    for name in names:
        module = name.removesuffix(".weight").rpartition(".")[2]
        table, norm = module in ("wte", "wpe", "tok_embeddings"), module.startswith("ln") or "norm" in module
        rate = 1.0 if table or norm else N0 * H0 / (N * H)
        rate *= L0 / L if module in ("c_proj", "wo", "w2") else 1.0
        rate *= (N / N0) ** -0.5 if module == "wq" else 1.0
        found[name] = rate * (N0 * H0 / (N * H) if tied and module == "ln_f" else 1.0)
    return found


def outcome(model, base):
    """Return "rows", "noted" where something is not judged, or the refusal."""
    import torch

    p = Parametrization(base=base)
    try:
        groups = torch_groups(p, model, TUNED)
    except UsageError as refused:
        return str(refused)
    rates = {name: row["lr"] for row in groups for name in row["names"]}
    tied = "lm_head.weight" in dict(model.named_parameters(remove_duplicate=False)) and "lm_head.weight" not in rates
    assert rates == pytest.approx(derived(rates, base, tied), rel=1e-12)
    optimizer = torch.optim.AdamW(model.parameters(), 1.0)
    notes = [note for note in audit_model(p, model, optimizer, TUNED).notes if "initial stds" not in note]
    return "noted" if any("judged" in note for note in notes) else "rows"


def attention(mix, order=(0, 1, 2)):
    """Return the forward pass of an attention with another product, or another order of its parts."""

    def forward(self, x):
        parts = self.c_attn(x).split(self.n_embd, 2)
        q, k, v = (parts[place].unflatten(-1, (self.n_head, -1)).transpose(1, 2) for place in order)
        return self.c_proj(mix(q, k, v).transpose(1, 2).flatten(2))

    return forward


def sdpa(q, k, v, **given):
    import torch

    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=not given, **given)


def alibi(q, k, v):
    import torch

    places = torch.arange(q.shape[2])
    slopes = torch.tensor([2.0 ** -(head + 1) for head in range(q.shape[1])])[:, None, None]
    falls = slopes * (places - places[:, None]).clamp(max=0)
    return sdpa(q, k, v, attn_mask=falls + torch.full((len(places),) * 2, -math.inf).triu(1))


def unit(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def parallel(self, x):
    return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))


def twice(self, x):
    x = x + self.attn(self.ln_1(x))
    return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))


def sandwich(self, x):
    x = x + unit(self.attn(self.ln_1(x)))
    return x + unit(self.mlp(self.ln_2(x)))


def nested(self, x):
    return x + self.mlp(self.ln_2(self.attn(self.ln_1(x))))


def gated_by_input(self, x):
    return self.c_proj(self.gelu(self.c_fc(x))) * x.mean(-1, keepdim=True).sigmoid()


def decode(run, head):
    def forward(self, idx, targets=None):
        import torch

        parts = self.transformer
        x = parts.wte(idx) + parts.wpe(torch.arange(idx.shape[1]))
        return head(self, run(parts.h, x))

    return forward


def again(blocks, x):
    for block in (*blocks, *blocks):
        x = block(x)
    return x


def once(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def usual_head(model, x):
    return model.lm_head(model.transformer.ln_f(x))


def first_table(model, x):
    return model.transformer.ln_f(x) @ model.transformer.wte.weight.T


def early(model, x):
    return model.lm_head(x)


BIG = "differ|holds query, key, value in one parameter"
VARIANTS = {  # model, its outcome where the width, the depth, the key dimension grows
    "nanoGPT": (nano, "rows", "rows", BIG),
    "untied": (lambda: untied(nano()), "rows", "rows", BIG),
    "keys before queries": (lambda: nano(CausalSelfAttention=attention(sdpa, (1, 0, 2))), "rows", "rows", BIG),
    "values first": (lambda: nano(CausalSelfAttention=attention(sdpa, (1, 2, 0))), "rows", "rows", BIG),
    "ALiBi": (lambda: nano(CausalSelfAttention=attention(alibi)), "rows", "rows", BIG),
    "QK-norm": (
        lambda: nano(CausalSelfAttention=attention(lambda q, k, v: sdpa(unit(q), unit(k), v))),
        "rows",
        "rows",
        r"a norm \(QK-norm\) stands behind",
    ),
    "keys that are the queries": (
        lambda: nano(CausalSelfAttention=attention(lambda q, k, v: sdpa(q, q, v))),
        *["the same numbers are key and query"] * 3,
    ),
    "no softmax": (
        lambda: nano(CausalSelfAttention=attention(lambda q, k, v: (q @ k.mT).tril() @ v)),
        *["linear attention"] * 3,
    ),
    "logits over N": (
        lambda: nano(CausalSelfAttention=attention(lambda q, k, v: sdpa(q / 8**0.5, k, v))),
        *["noted"] * 3,
    ),
    "parallel": (lambda: nano(Block=parallel), "rows", "rows", BIG),
    "attention twice": (lambda: nano(Block=twice), "noted", "shared layers are not derived", BIG),
    "norms behind branches": (lambda: nano(Block=sandwich), "noted", "a norm stands behind", BIG),
    "MLP of attention": (lambda: nano(Block=nested), *["no derived part"] * 3),
    "MLP under a gate": (lambda: nano(MLP=gated_by_input), *["a sum over features that does not make it a norm"] * 3),
    "blocks run twice": (lambda: nano(GPT=decode(again, usual_head)), "noted", "shared layers are not derived", BIG),
    "tied, and the last norm idle": (
        lambda: nano(GPT=decode(once, early)),
        "no output of the last norm",
        "noted",
        "no output of the last norm",
    ),
    "read out by another table": (
        lambda: untied(
            nano(GPT=decode(once, lambda model, x: model.transformer.ln_f(x) @ model.transformer.wte.weight.T))
        ),
        r"called embedding and acts as embedding\+unembedding",
        "noted",
        BIG,
    ),
    "LLaMA": (lambda: build(TORCHTITAN), "rows", "rows", "rows"),
    "keys in groups": (lambda: build(TORCHTITAN, groups=2), "rows", "rows", "rows"),
    "queries as values": (lambda: exchanged("query", "value"), "rows", "rows", "is called value and acts as query"),
    "keys as values": (lambda: exchanged("key", "value"), "rows", "rows", "rows"),
    "in and out of a square MLP": (
        lambda: exchanged("mlp_in", "mlp_out", ratio=1),
        "rows",
        "is called mlp_out and acts as mlp_in",
        "rows",
    ),
    "a gate beside attention": (lambda: beside("layers.{}.attention.gate.weight", 32, 32), *[MAP] * 3),
    "latent keys and values": (lambda: beside("layers.{}.attention.wkv_a.weight", 12, 32), *[MAP] * 3),
    "a second norm": (lambda: beside("layers.{}.attention_norm_2.weight", 32), *[MAP] * 3),
    "a scalar": (lambda: beside("layers.{}.alpha", 1), *[MAP] * 3),
}


def exchanged(one, other, **sizes):
    return build(TORCHTITAN | {one: TORCHTITAN[other], other: TORCHTITAN[one]}, **sizes)


def beside(name, *sides):
    import torch
    from tests.scaling.own_models import place

    model = build(TORCHTITAN)
    for layer in range(3):
        place(model, name.format(layer), torch.nn.Parameter(torch.ones(sides)))
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("base", "place"), [(WIDE, 0), (DEEP, 1), (KEYS, 2)])
def test_no_variant_has_a_silent_wrong_row(variant, base, place):
    make, *outcomes = VARIANTS[variant]
    found, expected = outcome(make(), base), outcomes[place]
    assert found == expected or (expected not in ("rows", "noted") and re.search(expected, found)), found


def named(swap=None, **sizes):
    """Return a model, and the role map of its listing with two roles exchanged."""
    one, other = swap or ("query", "query")
    roles = role_map(TORCHTITAN | {one: TORCHTITAN[other], other: TORCHTITAN[one]})
    return build(TORCHTITAN, **sizes), {name: part for name, part in roles.items() if not name.endswith("bias")}


@pytest.mark.parametrize(
    ("swap", "base", "exponent", "said"),
    [
        (("query", "value"), KEYS, 1, "is called value and acts as query"),
        (("key", "value"), KEYS, 0.5, "is called value and acts as key"),
        (("mlp_gate", "mlp_out"), DEEP, 1, "is called mlp_out and acts as mlp_gate"),
        (("embedding", "unembedding"), WIDE, 1, "is called unembedding and acts as embedding"),
        (("attention_norm", "mlp_norm"), DEEP, 1, ""),  # both parts have the same factors
        (("mlp_gate", "mlp_in"), KEYS, 1, ""),
        (("query", "value"), WIDE, 0.5, ""),
    ],
)
def test_a_role_map_is_held_against_the_forward_pass(swap, base, exponent, said):
    model, roles = named(swap, ratio=1)
    p = Parametrization(base=base, logit_exponent=exponent)
    if said:
        with pytest.raises(UsageError, match=f"{said}, and their factors differ here"):
            torch_groups(p, model, TUNED, roles, SHAPE)
    else:
        right = [torch_groups(p, model, TUNED, each, SHAPE) for each in (roles, named()[1])]
        rates, same = ({name: row["lr"] for row in each for name in row["names"]} for each in right)
        assert rates == pytest.approx(same, rel=1e-12)


def test_queries_and_keys_are_exchanged_where_neither_is_first():
    model, roles = named(("query", "key"))
    groups = torch_groups(Parametrization(base=KEYS), model, TUNED, roles, SHAPE)
    (rate,) = (row["lr"] for row in groups if "layers.0.attention.wk.weight" in row["names"])
    assert rate == pytest.approx(0.5 * 2**-0.5, rel=1e-12)
    model, roles = named(("query", "key"), groups=2)
    with pytest.raises(UsageError, match=r"is called (query and acts as key|key and acts as query)"):
        torch_groups(Parametrization(base=Shape(*KEYS, key_heads=2)), model, TUNED, roles, Shape(*SHAPE, key_heads=2))


def test_a_role_map_is_the_word_of_its_user_where_the_forward_pass_shows_no_part():
    model = nano(Block=nested)
    parts = {"wte": "embedding", "wpe": "positional", "attn.c_attn": "query+key+value", "attn.c_proj": "output"}
    parts |= {"ln_1": "attention_gain", "ln_2": "mlp_gain", "c_fc": "mlp_in", "mlp.c_proj": "mlp_out"}
    roles = {f"*{name}.weight": part for name, part in (parts | {"ln_f": "final_gain"}).items()}
    roles |= {"lm_head.weight": "unembedding"}
    assert torch_groups(Parametrization(base=WIDE), model, TUNED, roles, SHAPE)
    with pytest.raises(UsageError, match="is not added to a stream"):
        torch_groups(Parametrization(base=DEEP), model, TUNED, roles, SHAPE)


def read_beside(model, x):
    return model.lm_head(model.transformer.ln_f(x)) + model.lm_head(model.transformer.h[0].ln_1(x))


def normed_twice(model, x):
    return model.lm_head(model.transformer.h[0].ln_1(model.transformer.ln_f(x)))


@pytest.mark.parametrize("head", [read_beside, normed_twice])
def test_the_last_norm_carries_the_multiplier_of_a_tied_table_if_the_table_reads_it_alone(head):
    with pytest.raises(UsageError, match=r"no output of the last norm, transformer\.ln_f, alone reaches"):
        torch_groups(Parametrization(base=WIDE), nano(GPT=decode(once, head)), TUNED)


def norm_of_all(self, x):
    x = x + self.attn(self.ln_1(x))
    return x + self.mlp(self.ln_1(x))


def test_a_norm_of_several_places_is_noted_and_refused_in_depth():
    assert outcome(nano(Block=norm_of_all), WIDE) == "noted"
    assert "one norm serves several points" in outcome(nano(Block=norm_of_all), DEEP)


def test_what_a_fused_matrix_holds_beside_queries_keys_and_values_is_refused():
    import torch

    model = nano()
    for block in model.transformer.h:
        block.attn.c_attn = torch.nn.Linear(32, 128, bias=False)  # a gate of as many rows
    with pytest.raises(UsageError, match="heads= has to divide them"):
        torch_groups(Parametrization(base=WIDE), model, TUNED)


def test_the_order_of_rows_in_thirds_is_noted_under_muon():
    p, tuned = Parametrization(base=WIDE, optimizer="muon"), BaseHyperparameters(1.0, muon=MuonHyperparameters(0.02))
    model = nano()
    named = dict(model.named_parameters())
    matrices = {name: t for name, t in named.items() if t.dim() == 2 and ".h." in name}
    kinds = {"c_attn": {"split": "thirds", "use_muon": True}, "": {"use_muon": True}}
    groups = [{"params": [t for name, t in named.items() if name not in matrices], "lr": 1.0, "use_muon": False}]
    for kind, row in kinds.items():
        some = [t for name, t in matrices.items() if ("c_attn" in name) == bool(kind)]
        groups.append({"params": some, "lr": 0.02, **row})
    groups = [row | {"weight_decay": 0.0, "eps": 1e-8} for row in groups]
    assert any(note.startswith("thirds of queries") for note in audit_model(p, model, groups, tuned).notes)

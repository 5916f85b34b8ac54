"""A parametrization as a program: ready to run, for optax with the library's transformer, and for plain PyTorch."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from manyheads.errors import UsageError
from manyheads.models.architecture import apply_role_map
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters, MuonHyperparameters
from manyheads.scaling.parametrization.muon import FACTORS
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.targets import Factors, forward_multipliers, parameter_targets, usual_multipliers
from manyheads.transformer.inputs import TokenInput
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Iterable


VOCABULARY, LENGTH = 64, 64  # of the model in the snippets, which stands for the reader's own
_INPUTS = f"TokenInput({VOCABULARY}), length={LENGTH}, outputs={VOCABULARY}"
ZERO = ("logit_bias", "bias", "unembedding_bias")  # roles that start at zero, whatever the factor


def optax_snippet(parametrization: Parametrization, shape: Shape, hyperparameters: BaseHyperparameters) -> str:
    """Return a program that makes the library's transformer at a shape and its optax optimizer.

    Examples
    --------
    >>> p = Parametrization(base=Shape(4, 2, 1))
    >>> exec(optax_snippet(p, Shape(4, 4, 1), BaseHyperparameters(1e-2)))
    """
    if hyperparameters.learning_rates:
        raise UsageError("the optax snippet has one learning rate for all roles at the base: leave learning_rates out")
    p, learning_rate, imported = parametrization, f"{hyperparameters.learning_rate!r}", ""
    if p.optimizer == "muon":
        made, imported = _optax_muon(p, hyperparameters), "Muon, "
    elif p.optimizer == "adam":
        decay = f", weight_decay={hyperparameters.weight_decay!r}" if hyperparameters.weight_decay else ""
        made = f"optax.adam{'w' if decay else ''}({learning_rate}, eps={hyperparameters.epsilon!r}{decay})"
    elif hyperparameters.weight_decay:
        made = f"optax.chain(optax.add_decayed_weights({hyperparameters.weight_decay!r}), optax.sgd({learning_rate}))"
    else:
        made = f"optax.sgd({learning_rate})"
    return f'''"""{_headline(p, shape)}"""

import jax
import optax

from manyheads.transformer import Shape, TokenInput, TransformerConfig, initialize
from manyheads.transformer.weights import roles
from manyheads.scaling import {imported}Parametrization

parametrization = {_constructed(p)}
shape = {shape!r}

# Inputs, length and outputs are yours. The stds of the weights, the scale of the logits and the factor of the
# branches come with the scaling.
config = TransformerConfig(shape, {_INPUTS}, causal=True, read_out="token")
model = initialize(config, parametrization.scaling(shape, config.inputs), jax.random.key(0))

# For a model of your own: a tree with the name of a role for every weight, in place of roles(model.weights).
tuned = {made}  # at the base
optimizer = parametrization.optax(tuned, roles(model.weights), shape)
state = optimizer.init(model.weights)
'''


def _optax_muon(p: Parametrization, hyperparameters: BaseHyperparameters) -> str:
    """Return the call that makes Muon and AdamW at the base; optax gives both one epsilon."""
    factors = {"original": None, "match_rms_adamw": 0.2, "sqrt(max(r,c))": 1.0}
    own = _refuse_factors(p, hyperparameters, "optax.contrib.muon", tuple(factors))
    rms = f"\n    consistent_rms={factors[p.muon.factor]}," if factors[p.muon.factor] else ""
    return f"""optax.contrib.muon(
    {own.learning_rate!r},
    ns_steps={own.ns_steps!r},
    beta={own.momentum!r},
    eps={hyperparameters.epsilon!r},
    nesterov={own.nesterov!r},
    weight_decay={own.weight_decay!r},
    adam_learning_rate={hyperparameters.learning_rate!r},
    adam_weight_decay={hyperparameters.weight_decay!r},
    muon_weight_dimension_numbers=parametrization.muon.dimensions(model.weights),{rms}
)"""


def _refuse_factors(
    p: Parametrization, hyperparameters: BaseHyperparameters, name: str, known: tuple[str, ...]
) -> MuonHyperparameters:
    """Return Muon's hyperparameters, or refuse a shape factor that is not among those that an optimizer knows."""
    if p.muon.factor not in known:
        listed = f"{', '.join(known[:-1])} and {known[-1]}"
        raise UsageError(
            f"{name} has the shape factors {listed}, not {FACTORS[p.muon.factor].formula}; choose one of these"
        )
    own = hyperparameters.of("muon")
    assert isinstance(own, MuonHyperparameters)
    return own


def torch_snippet(parametrization: Parametrization, shape: Shape, hyperparameters: BaseHyperparameters) -> str:
    """Return a program for PyTorch alone: numbers by class, a small transformer that takes them, parameter groups.

    Stds are those of fan-in at the base, as in `manyheads.transformer.standard_scaling`.
    """
    if parametrization.form != "effective":
        raise UsageError("the torch snippet is written in effective form: leave out --form multiplier")
    table, rule = parametrization.table(shape), {"adam": "AdamW", "sgd": "SGD"}.get(parametrization.optimizer)
    optimizer = f"optimizer = torch.optim.{rule}(parameter_groups(model))"
    optimizer = optimizer if rule else _torch_muon(parametrization, hyperparameters)
    start = standard_scaling(parametrization.base, TokenInput(VOCABULARY)).initial
    rows = [row for row in table.rows if row.role not in ZERO]
    forward = forward_multipliers(parametrization, shape)
    found = {row.role: Factors(row.initial, row.learning_rate, row.epsilon, row.rule) for row in rows}
    # With its factor in the forward pass the read-out starts and trains as at the base: what `audit` calls applied.
    read_out = found["unembedding"].fold(1 / forward.output)
    # As there, too: width-only practice leaves epsilon alone where the factor stands in the forward pass.
    found["unembedding"] = replace(read_out, epsilon=1.0) if parametrization.scheme == "mup" else read_out
    if lost := [name for name in hyperparameters.learning_rates if name not in found]:
        raise UsageError(f"the torch snippet has no group of {lost[0]}: leave its learning rate out, or take its role")
    initial = _entries((role, f"{start[role] * factors.initial:.10g}") for role, factors in found.items())
    groups = _entries((role, _group(hyperparameters, role, factors)) for role, factors in found.items())
    words = {
        "SIZES": f"{shape.key_dim}, {shape.heads}, {shape.depth}",
        "WIDTH": str(shape.stream or "N * H"),
        "INITIAL": initial,
        "GROUPS": groups,
        "LOGIT": f"{table.logit_prefactor * shape.key_dim**-table.logit_exponent:.10g}",
        "BRANCH": f"{forward.branch:.10g}",
        "OUTPUT": f"{forward.output:.10g}",
        "VOCABULARY": str(VOCABULARY),
        "LENGTH": str(LENGTH),
        "OPTIMIZER": optimizer,
    }
    return f'"""{_headline(parametrization, shape)}"""\n' + re.sub("<([A-Z]+)>", lambda found: words[found[1]], _TORCH)


def _torch_muon(p: Parametrization, hyperparameters: BaseHyperparameters) -> str:
    """Return the lines that make Muon for the matrices of the blocks and AdamW for the rest."""
    if p.muon.split != "whole":
        raise UsageError(f"torch.optim.Muon orthogonalizes whole matrices, not split={p.muon.split!r}: take 'whole'")
    own = _refuse_factors(p, hyperparameters, "torch.optim.Muon", ("original", "match_rms_adamw"))
    return f"""groups = parameter_groups(model)
muon = torch.optim.Muon(
    [group for group in groups if group["algorithm"] == "muon"],
    momentum={own.momentum!r}, nesterov={own.nesterov!r}, ns_steps={own.ns_steps!r}, adjust_lr_fn="{p.muon.factor}",
)
adamw = torch.optim.AdamW([group for group in groups if group["algorithm"] == "adamw"])
optimizers = [muon, adamw]  # step both"""


def transformers_snippet(
    parametrization: Parametrization,
    shape: Shape,
    hyperparameters: BaseHyperparameters,
    config: str,
    fused: bool = False,
) -> str:
    """Return a program that makes a model of Hugging Face transformers from its `config.json`, and its optimizer.

    Where queries, keys and values are fused in one matrix (GPT-2, GPT-NeoX) and N changes, the program sets the scale
    of the logits, which such a matrix cannot carry.

    """
    made = "groups = torch_groups(parametrization, model, hyperparameters)"
    if parametrization.optimizer == "muon":
        made = _torch_muon(parametrization, hyperparameters).replace("groups = parameter_groups(model)", made, 1)
        tuned = f"    muon={hyperparameters.muon!r},\n"
        names = ", Muon, MuonHyperparameters"
    else:
        rule = "AdamW" if parametrization.optimizer == "adam" else "SGD"
        made = f"optimizer = torch.optim.{rule}(torch_groups(parametrization, model, hyperparameters))"
        tuned = names = ""
    tuned += f"    learning_rates={dict(hyperparameters.learning_rates)!r},\n" if hyperparameters.learning_rates else ""
    own = fused and _needs_own_scale(parametrization, shape, hyperparameters)
    imported = ", scale_logits" if own else ""
    scaled = _SCALED if own else ""
    return f'''"""{_headline(parametrization, shape)}"""

import torch
from transformers import AutoConfig, AutoModel

from manyheads.transformer import Shape
from manyheads.scaling import Parametrization, BaseHyperparameters, initialize_model{imported}, torch_groups{names}

parametrization = {_constructed(parametrization)}
hyperparameters = BaseHyperparameters(
    learning_rate={hyperparameters.learning_rate!r},
    epsilon={hyperparameters.epsilon!r},
    weight_decay={hyperparameters.weight_decay!r},
{tuned})

# AutoModelForCausalLM and the like make the same model with its head.
model = AutoModel.from_config(AutoConfig.from_pretrained({config!r}))
{scaled}initialize_model(parametrization, model, hyperparameters)
{made}
'''


def _needs_own_scale(p: Parametrization, shape: Shape, hyperparameters: BaseHyperparameters) -> bool:
    """Whether the usual scale of the logits leaves queries with a factor that keys and values have not."""
    architecture = apply_role_map({"*": "query+key+value"}, shape, ["the matrix"])
    try:
        parameter_targets(p, architecture, hyperparameters)
    except UsageError:
        own = replace(usual_multipliers(p, shape), logit=forward_multipliers(p, shape).logit)
        parameter_targets(p, architecture, hyperparameters, own)
        return True
    return False


def _constructed(p: Parametrization) -> str:
    muon = f"\n    muon={p.muon!r}," if p.optimizer == "muon" else ""
    return f"""Parametrization(
    logit_exponent={p.logit_exponent!r},
    depth_exponent={p.depth_exponent!r},
    richness={p.richness!r},
    optimizer="{p.optimizer}",
    base={p.base!r},
    scheme="{p.scheme}",
    form="{p.form}",{muon}
)"""


def _headline(p: Parametrization, shape: Shape) -> str:
    sizes = [f"({each.key_dim}, {each.heads}, {each.depth})" for each in (p.base, shape)]
    return f"From (N, H, L) = {sizes[0]} to {sizes[1]}: scheme {p.scheme}, {p.optimizer}. Written by manyheads scale."


def _group(hyperparameters: BaseHyperparameters, role: str, factors: Factors) -> str:
    tuned = hyperparameters.of(factors.rule)
    parts = {"lr": hyperparameters.rate_of((role,), factors.rule) * factors.learning_rate}
    parts |= {} if factors.rule == "sgd" else {"eps": tuned.epsilon * factors.epsilon}
    parts["weight_decay"] = tuned.weight_decay / factors.learning_rate
    words = [f'"{name}": {value:.10g}' for name, value in parts.items()]
    if hyperparameters.muon:
        words.append(f'"algorithm": "{"muon" if factors.rule == "muon" else "adamw"}"')
    return "{" + ", ".join(words) + "}"


def _entries(pairs: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f'    "{role}": {value},' for role, value in pairs)


_SCALED = """
# Queries, keys and values share one matrix, so that the attention itself scales the logits. The scale is not saved with
# the weights: repeat this after loading.
scale_logits(model, parametrization)
"""

_TORCH = """
import torch
from torch import nn

N, H, L = <SIZES>
D = <WIDTH>  # of the residual stream
INITIAL = {  # std at the start; gains start at this constant
<INITIAL>
}
GROUPS = {
<GROUPS>
}
LOGIT = <LOGIT>  # logits are LOGIT * (q @ k)
BRANCH = <BRANCH>  # every block adds BRANCH times what it computes
OUTPUT = <OUTPUT>  # outputs are OUTPUT * unembedding: its factor as a multiplier, so that its init and rate stay
ROLES = {  # how a parameter's name ends: what it is; make this fit your model, the first that fits counts
    "unembedding.weight": "unembedding",
    "embedding.weight": "embedding",
    "positional.weight": "positional",
    "query.weight": "query",
    "key.weight": "key",
    "value.weight": "value",
    "output.weight": "output",
    "mlp_in.weight": "mlp_in",
    "mlp_out.weight": "mlp_out",
    "final_norm.weight": "final_norm",
    "_norm.weight": "norm",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        self.query, self.key, self.value = (nn.Linear(D, N * H, bias=False) for _ in range(3))
        self.output = nn.Linear(N * H, D, bias=False)
        self.mlp_in, self.mlp_out = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, stream):
        z = self.attention_norm(stream)
        q, k, v = (part(z).unflatten(-1, (H, N)).transpose(-2, -3) for part in (self.query, self.key, self.value))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=LOGIT)
        stream = stream + BRANCH * self.output(seen.transpose(-2, -3).flatten(-2))
        return stream + BRANCH * self.mlp_out(nn.functional.gelu(self.mlp_in(self.mlp_norm(stream))))


class Model(nn.Module):
    def __init__(self, vocabulary=<VOCABULARY>, length=<LENGTH>):
        super().__init__()
        self.embedding, self.positional = nn.Embedding(vocabulary, D), nn.Embedding(length, D)
        self.blocks = nn.Sequential(*[Block() for _ in range(L)])
        self.final_norm = nn.LayerNorm(D, bias=False)
        self.unembedding = nn.Linear(D, vocabulary, bias=False)

    def forward(self, tokens):
        stream = self.embedding(tokens) + self.positional.weight[: tokens.shape[-1]]
        return OUTPUT * self.unembedding(self.final_norm(self.blocks(stream)))


def role_of(name):
    found = [role for end, role in ROLES.items() if name.endswith(end)]
    if not found:
        raise KeyError(f"{name}: no role is known; add how it ends to ROLES")
    return found[0]


def initialize(model):
    for name, parameter in model.named_parameters():
        role = role_of(name)
        if role in ("norm", "final_norm"):
            nn.init.constant_(parameter, INITIAL[role])
        else:
            nn.init.normal_(parameter, std=INITIAL[role])
    return model


def parameter_groups(model):
    named = [(role_of(name), parameter) for name, parameter in model.named_parameters()]
    return [
        {"params": [parameter for role, parameter in named if role == one], **GROUPS[one]}
        for one in dict.fromkeys(role for role, _ in named)
    ]


model = initialize(Model())
<OPTIMIZER>
"""

"""Multipliers of forward passes, measured on models that have them; where folding has no effect it is refused."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from tests.scaling.torch_models import PLAIN, plain, train

from manyheads.errors import UsageError
from manyheads.models.infer.multipliers import read_multipliers
from manyheads.scaling import (
    BaseHyperparameters,
    ForwardMultipliers,
    Parametrization,
    audit_model,
    initialize_model,
    torch_groups,
)
from manyheads.scaling.parametrization.targets import forward_multipliers
from manyheads.scaling.torch.groups import ModelOptions, read_model
from manyheads.transformer import Shape

pytestmark = pytest.mark.torch

BASE = Shape(8, 4, 2)
TUNED = BaseHyperparameters(1e-3, weight_decay=0.1, no_decay=("norm", "final_norm"))
KEYS, HEADS, DEPTH = Shape(16, 4, 2), Shape(8, 8, 2), Shape(8, 4, 4)  # one axis at a time

ROLES = {  # of decoders in transformers; those that fit nothing are left out
    "*embed_tokens.weight": "embedding",
    "*qkv_proj.weight": "query+key+value",
    "*q_proj.weight": "query",
    "*k_proj.weight": "key",
    "*v_proj.weight": "value",
    "*o_proj.weight": "output",
    "*gate_proj.weight": "mlp_in",
    "*up_proj.weight": "mlp_in",
    "*gate_up_proj.weight": "mlp_in",
    "*down_proj.weight": "mlp_out",
    "*layers.*norm.weight": "attention_gain",
    "model.norm.weight": "final_gain",
    "lm_head.weight": "unembedding",
}


def decoder(name, shape, **changes):
    """Return a tiny decoder of transformers and its roles."""
    import torch
    import transformers

    torch.set_num_threads(1)
    sizes = {"hidden_size": shape.width, "num_attention_heads": shape.heads, "num_hidden_layers": shape.depth}
    sizes |= {"head_dim": shape.key_dim, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 29}
    sizes |= {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 12}
    config = getattr(transformers, f"{name}Config")(**(sizes | changes))
    config._attn_implementation = changes.get("implementation", "eager")
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    names = [each for each, _ in model.named_parameters(remove_duplicate=False)]
    roles: dict[str, str] = {}
    for pattern, part in ROLES.items():
        if any(fnmatchcase(each, pattern) and not any(fnmatchcase(each, one) for one in roles) for each in names):
            roles[pattern] = part
    return model, roles


def measured(model, roles, shape, example=None):
    return read_multipliers(model, read_model(model, ModelOptions(roles, shape)), example)


def only(found, rounding=0.0):
    """The one number that all modules of a multiplier share."""
    assert not found.unknown
    first = next(iter(found.values.values()))
    assert list(found.values.values()) == pytest.approx([first] * len(found.values), rel=max(1e-3, 2 * rounding))
    return first


@pytest.mark.parametrize("forward", [None, (0.3, 0.11, 0.7)])
@pytest.mark.parametrize("tied", [False, True])
def test_planted_multipliers_are_measured(forward, tied):
    model = plain(BASE, 7, 6, forward, tied)
    roles = {pattern: part for pattern, part in PLAIN.items() if not (tied and pattern == "unembedding.bias")}
    before, mode = {name: t.clone() for name, t in model.state_dict().items()}, model.training
    found = measured(model, roles, BASE)
    branch, logit, output = forward or (1.0, BASE.key_dim**-0.5, 1.0)
    assert only(found.logit) == pytest.approx(logit)
    assert only(found.branch) == pytest.approx(branch)
    assert only(found.output) == pytest.approx(output)
    assert only(found.embedding) == pytest.approx(1)
    assert all(t.equal(before[name]) for name, t in model.state_dict().items())
    assert model.training is mode


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32"])
def test_multipliers_in_any_precision_and_of_weights_that_are_zero(precision):
    import torch

    model = plain(BASE, 7, 6, (0.3, 0.11, 0.7)).to(getattr(torch, precision))
    with torch.no_grad():
        for name in ("unembedding.weight", "blocks.0.output.weight", "blocks.1.query.weight", "embedding.weight"):
            model.get_parameter(name).zero_()
    found = measured(model, PLAIN, BASE)
    rounding = torch.finfo(getattr(torch, precision)).eps
    tolerance = {"rel": max(1e-5, 2 * rounding)}
    numbers = [only(each, rounding) for each in (found.branch, found.logit, found.output, found.embedding)]
    assert numbers == pytest.approx([0.3, 0.11, 0.7, 1.0], **tolerance)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_multipliers_of_a_granite_are_those_of_its_configuration(implementation):
    """Independent of this library: `config.json` says them."""
    said = {"residual_multiplier": 0.22, "logits_scaling": 4.0, "embedding_multiplier": 12.0}
    model, roles = decoder("Granite", BASE, **said, attention_multiplier=0.125, implementation=implementation)
    found = measured(model, roles, BASE)
    numbers = [only(each) for each in (found.branch, found.output, found.embedding, found.logit)]
    assert numbers == pytest.approx([0.22, 1 / 4.0, 12.0, 0.125], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "logit", "branch", "embedding"),
    [
        ("Llama", 8**-0.5, 1, 1),
        ("Mistral", 8**-0.5, 1, 1),
        ("Phi3", 8**-0.5, 1, 1),  # queries, keys and values in one matrix, keys shared
        ("Qwen3", 8**-0.5, 1, 1),  # a norm without a part of its own
        ("Gemma", 8**-0.5, 1, 32**0.5),
        ("Gemma2", 256**-0.5, None, 32**0.5),
        ("Gemma3Text", 256**-0.5, None, 32**0.5),
        ("Olmo2", 8**-0.5, None, 1),
    ],
)
def test_multipliers_of_decoders_and_norms_that_hide_them(name, logit, branch, embedding):
    found = measured(*decoder(name, BASE), BASE)
    assert found.logit.normed == (name in ("Qwen3", "Gemma3Text", "Olmo2"))
    for multiplier, expected in ((found.logit, logit), (found.branch, branch), (found.embedding, embedding)):
        if expected is None:
            assert "does not follow" in multiplier.unknown[0] or "do not follow" in multiplier.unknown[0]
        else:
            assert only(multiplier) == pytest.approx(expected, rel=1e-4)


def refusal(model, roles, shape, p=None, **given):
    """What an audit, groups and initialization say alike."""
    import torch

    p, said = p or Parametrization(base=BASE), []
    hyperparameters = replace(TUNED, stds=dict.fromkeys(("embedding", "query"), 0.1))
    asked = (
        lambda: audit_model(p, model, torch.optim.AdamW(model.parameters()), hyperparameters, roles, shape, **given),
        lambda: torch_groups(p, model, hyperparameters, roles, shape, **given),
        lambda: initialize_model(p, model, hyperparameters, roles, shape, **given),
    )
    for ask in asked:
        with pytest.raises(UsageError) as caught:
            ask()
        said.append(str(caught.value))
    assert len(set(said)) == 1
    return said[0]


def test_a_logit_factor_that_a_norm_cancels_is_refused():
    said = refusal(*decoder("Qwen3", KEYS), KEYS)
    assert "the factor 0.7071 on the logits would have no known effect" in said
    assert "a norm (QK-norm) stands behind model.layers.0.self_attn.q_proj" in said
    assert "folded=ForwardMultipliers(" in said
    model, roles = decoder("Qwen3", KEYS)
    p = Parametrization(base=BASE)
    own = replace(forward_multipliers(p, KEYS), output=1.0)
    query = {group["role"]: group for group in torch_groups(p, model, TUNED, roles, KEYS, own)}["query"]
    assert query["lr"] == pytest.approx(
        TUNED.learning_rate / 2
    )  # the model scales its logits, so that the weight does not
    for shape in (HEADS, DEPTH):  # where N stays there is no factor on logits
        model, roles = decoder("Qwen3", shape)
        assert torch_groups(p, model, TUNED, roles, shape)


def test_a_branch_factor_that_a_norm_behind_it_cancels_is_refused():
    model, roles = decoder("Gemma2", DEPTH)
    said = refusal(model, roles, DEPTH)
    assert "the factor 0.5 on the branches would have no known effect" in said
    assert (
        "what is added to the stream does not follow model.layers.0.self_attn.o_proj: a norm stands behind it" in said
    )


@pytest.mark.parametrize(
    ("shape", "forward", "said"),
    [
        (
            KEYS,
            (1.0, 0.11, 1.0),
            "blocks.0.query multiplies its logits by 0.11, and folded=True expects 0.25 or 0.176777",
        ),
        (DEPTH, (0.5, 8**-0.5, 1.0), "blocks.0.output multiplies its branches by 0.5, and folded=True expects 1"),
        (DEPTH, (0.25, 8**-0.5, 1.0), "multiplies its branches by 0.25, and folded=True expects 1"),
        (HEADS, (1.0, 8**-0.5, 0.5), "unembedding multiplies its outputs by 0.5, and folded=True expects 1"),
    ],
)
def test_a_model_that_multiplies_itself_and_is_folded_as_well_is_refused(shape, forward, said):
    message = refusal(plain(shape, 7, 6, forward), PLAIN, shape)
    assert said in message
    assert "folded=False if it applies all of forward_multipliers" in message


@pytest.mark.parametrize("shape", [DEPTH, HEADS])
def test_a_model_that_is_said_to_multiply_and_does_not_is_refused(shape):
    assert "and folded=False expects" in refusal(plain(shape, 7, 6), PLAIN, shape, folded=False)
    p = Parametrization(base=BASE)
    asked = forward_multipliers(p, shape)
    right = plain(shape, 7, 6, (asked.branch, 8**-0.5, asked.output))
    assert torch_groups(p, right, TUNED, PLAIN, shape, folded=False)
    model, _ = decoder("Llama", shape)  # of a known family, whose forward pass is asked as well
    assert "and folded=False expects" in refusal(model, None, None, folded=False)


def test_own_logits_need_no_folding():
    """1/N, and 1/N times what makes the base usual, are what the parametrization asks for."""
    p = Parametrization(base=BASE)
    learning_rates = []
    for logit in (1 / 16, 8**0.5 / 16, 16**-0.5):
        groups = torch_groups(p, plain(KEYS, 7, 6, (1.0, logit, 1.0)), TUNED, PLAIN, KEYS)
        learning_rates.append({group["role"]: group["lr"] for group in groups}["query"])
    assert learning_rates == pytest.approx(
        [TUNED.learning_rate / 2, TUNED.learning_rate / 2, TUNED.learning_rate / 2 / 2**0.5]
    )


def test_what_cannot_be_run_is_refused_where_it_matters_and_believed_if_said():
    import torch

    class Batched(torch.nn.Module):
        """Takes a batch of its own kind."""

        def __init__(self, shape):
            super().__init__()
            self.inner = plain(shape, 7, 6)

        def forward(self, batch):
            return self.inner(batch["tokens"])

    roles = {f"inner.{pattern}": part for pattern, part in PLAIN.items()}
    p, model = Parametrization(base=BASE), Batched(DEPTH)
    said = refusal(model, roles, DEPTH)
    assert "the forward pass did not run (IndexError" in said
    example = ({"tokens": torch.zeros(2, 4, dtype=torch.long)},)
    groups = [
        torch_groups(p, model, TUNED, roles, DEPTH, example=example),
        torch_groups(p, model, TUNED, roles, DEPTH, ForwardMultipliers()),
    ]
    assert [group["lr"] for group in groups[0]] == [group["lr"] for group in groups[1]]
    assert torch_groups(p, Batched(BASE), TUNED, roles, BASE)  # nothing to fold
    with pytest.raises(UsageError, match="ForwardMultipliers: branch=0: expected a positive number"):
        ForwardMultipliers(branch=0)


def test_attention_of_torch_itself_is_read():
    import torch
    from torch import nn

    class Encoder(nn.Module):
        def __init__(self, first):
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=first)
            self.embedding = nn.Embedding(11, 32)
            self.layers = nn.ModuleList(layer for _ in range(1))
            self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 11)

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.out(self.norm(x))

    parts = {"in_proj": "query+key+value", "out_proj": "output", "linear1": "mlp_in", "linear2": "mlp_out"}
    roles = {"embedding.weight": "embedding", "out.weight": "unembedding", "out.bias": "unembedding_bias"}
    roles |= {"norm.weight": "final_gain", "norm.bias": "final_shift"}
    roles |= {"*in_proj_weight": "query+key+value", "*in_proj_bias": "query_bias+key_bias+value_bias"}
    roles |= {f"*{name}.weight": part for name, part in parts.items() if name != "in_proj"}
    roles |= {f"*{name}.bias": f"{part}_bias" for name, part in parts.items() if name != "in_proj"}
    roles |= {"*norm*.weight": "attention_gain", "*norm*.bias": "attention_shift"}
    shape = Shape(8, 4, 1)
    found = measured(Encoder(True), roles, shape)
    assert [only(each) for each in (found.logit, found.branch)] == pytest.approx([8**-0.5, 1])
    assert "a norm" in measured(Encoder(False), roles, shape).branch.unknown[0]
    assert torch.backends.mha.get_fastpath_enabled()


class _Scaled:
    """A projection and a table that multiply by a number of their own, and a gain of the form 1 + w."""

    @staticmethod
    def linear(factor, *sizes):
        from torch import nn

        class Scaled(nn.Linear):
            def forward(self, x):
                return factor * super().forward(x)

        return Scaled(*sizes).double()

    @staticmethod
    def table(factor, *sizes):
        from torch import nn

        class Scaled(nn.Embedding):
            def forward(self, x):
                return factor * super().forward(x)

        return Scaled(*sizes).double()

    @staticmethod
    def norm(width):
        import torch
        from torch import nn

        class Shifted(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(width, dtype=torch.float64))

            def forward(self, x):
                return (1 + self.weight) * nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6)

        return Shifted()


def test_projections_that_multiply_within_themselves_are_seen():
    model = plain(BASE, 7, 6)
    model.blocks[0].query = model.blocks[1].query = _Scaled.linear(0.5, 32, 32)
    model.blocks[0].mlp_out = _Scaled.linear(0.25, 128, 32)
    found = measured(model, PLAIN, BASE)
    assert only(found.logit) == pytest.approx(0.5 * 8**-0.5)
    assert found.branch.values["blocks.0.mlp_out"] == pytest.approx(0.25)
    assert found.branch.values["blocks.1.mlp_out"] == pytest.approx(1)


SPREADS = dict.fromkeys(("embedding", "positional", "query", "key", "value", "output", "mlp_in", "mlp_out"), 0.3)
WITHOUT_SHIFT = {k: v for k, v in PLAIN.items() if k not in ("final_norm.bias", "unembedding.bias")}


def test_gains_of_the_form_one_plus_w_start_at_zero_and_train_as_plain_ones(seed):
    """Gemma's: no false alarm, `initialize` leaves them at zero, and with a tied table 1 + w carries the factor."""
    import torch

    p, hyperparameters = Parametrization(base=BASE), replace(TUNED, stds=SPREADS | {"unembedding": 0.3})
    tokens = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(seed))
    curves = []
    for shifted in (False, True):
        model = plain(HEADS, 7, 6, tied=True)
        if shifted:
            model.final_norm = _Scaled.norm(HEADS.width)
        else:
            model.final_norm.bias = None
        initialize_model(p, model, hyperparameters, WITHOUT_SHIFT, HEADS, generator=torch.Generator().manual_seed(seed))
        assert torch.all(model.final_norm.weight == (-0.5 if shifted else 0.5))
        assert audit_model(
            p,
            model,
            torch_groups(p, model, hyperparameters, WITHOUT_SHIFT, HEADS),
            hyperparameters,
            WITHOUT_SHIFT,
            HEADS,
        ).passed
        optimizer = torch.optim.AdamW(torch_groups(p, model, hyperparameters, WITHOUT_SHIFT, HEADS), lr=1.0)
        curves.append(train(model, optimizer, tokens, 4))
        with pytest.MonkeyPatch.context() as patch:  # and a wrong gain is a fault still
            patch.setattr(model.final_norm.weight, "data", model.final_norm.weight.data * 0 + 1.5)
            rows = torch_groups(p, model, hyperparameters, WITHOUT_SHIFT, HEADS)
            faults = audit_model(p, model, rows, hyperparameters, WITHOUT_SHIFT, HEADS, fresh=True).faults
            assert "final_norm.weight" in {each.name for each in faults}
    assert curves[0] == pytest.approx(curves[1], rel=0, abs=1e-12)
    with pytest.raises(UsageError, match=r"final_norm.weight is a gain of the form 1 \+ w.*no_decay=\('final_gain',\)"):
        torch_groups(p, model, replace(hyperparameters, no_decay=()), WITHOUT_SHIFT, HEADS)
    assert torch_groups(p, plain(BASE, 7, 6, tied=True), replace(hyperparameters, no_decay=()), {**PLAIN_TIED}, BASE)


PLAIN_TIED = {pattern: part for pattern, part in PLAIN.items() if pattern != "unembedding.bias"}


def test_a_gemma_raises_no_false_alarm(seed):
    """Its gains are 1 + w, its embeddings are multiplied by the root of the width, its table is tied."""
    import torch

    torch.manual_seed(seed)
    model, roles = decoder("Gemma", BASE)
    p = Parametrization(base=BASE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TUNED.learning_rate, weight_decay=0.1)
    hyperparameters = replace(TUNED, no_decay=())
    audit = audit_model(p, model, optimizer, hyperparameters, roles, BASE)
    assert audit.passed, str(audit)
    stds = dict.fromkeys(("embedding", "query", "key", "value", "output", "mlp_in", "mlp_out"), 0.02)
    initialize_model(p, model, replace(hyperparameters, stds=stds), roles, BASE)
    assert not any(t.any() for name, t in model.named_parameters() if name.endswith("norm.weight"))


def with_table(factor, tied):
    """Return the plain module at more heads whose table multiplies by a factor, and its roles."""
    model = plain(HEADS, 7, 6, tied=tied)
    model.embedding = _Scaled.table(factor, 7, HEADS.width)
    if tied:
        model.unembedding.weight = model.embedding.weight
    return model, PLAIN_TIED if tied else PLAIN


@pytest.mark.parametrize("tied", [False, True])
def test_a_multiplier_of_the_embeddings_is_folded(seed, tied):
    """With one over it in the table, and before a tied read-out times it, the model trains as without it."""
    import torch

    p, hyperparameters = (
        Parametrization(base=BASE),
        BaseHyperparameters(3e-3, 1e-4, 0.1, SPREADS | {"unembedding": 0.3}),
    )
    tokens = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(seed))
    grown = (HEADS.width / BASE.width) ** 0.5
    curves = []
    for factor in (1.0, grown):
        model, roles = with_table(factor, tied)
        initialize_model(
            p,
            model,
            hyperparameters,
            roles,
            HEADS,
            ForwardMultipliers(embedding=factor),
            torch.Generator().manual_seed(seed),
        )
        groups = torch_groups(p, model, hyperparameters, roles, HEADS, ForwardMultipliers(embedding=factor))
        curves.append(train(model, torch.optim.AdamW(groups, lr=1.0), tokens, 4))
    assert curves[0][-1] < curves[0][0]
    assert curves[0] == pytest.approx(curves[1], rel=0, abs=1e-6)
    root, roles = with_table(HEADS.width**0.5, tied)  # as Gemma has it: measured, the same factor over the base's
    learning_rates = [group["lr"] for group in torch_groups(p, root, hyperparameters, roles, HEADS)]
    assert learning_rates == [group["lr"] for group in groups]
    other, roles = with_table(3.0, tied)
    with pytest.raises(UsageError, match="embeddings by 3, and folded=True expects 1 or 8"):
        torch_groups(p, other, hyperparameters, roles, HEADS)


LAYOUTS = ("plain", "norm before", "norm behind", "norm of all heads", "norm without gains", "einsum modules")
LAYOUTS += ("einsum parameters", "keys and values in one", "one matrix, groups", "heads last in logits")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (5, 5), (6, 3)])
def test_logits_are_measured_in_every_layout_of_axes(layout, heads, groups):
    """Queries as (B, T, H N), (B, T, H, N) or (B, H, T, N), with or without norms, from modules or parameters."""
    from tests.scaling.attention_layouts import Decoder, roles_of

    shape = Shape(16, heads, 2)
    model = Decoder(shape, layout, 0.123, groups)
    found = measured(model, roles_of(model), shape)
    assert only(found.logit) == pytest.approx(0.123, rel=1e-4)
    assert found.logit.normed == (layout == "norm without gains")
    assert only(found.branch) == pytest.approx(1, rel=1e-4)


def test_a_norm_behind_the_transposed_queries_carries_the_logit_factor():
    """On (B, H, T, N), over N: accepted as on (B, T, H, N), with the same groups."""
    from tests.scaling.attention_layouts import Decoder, roles_of

    rates = []
    for layout in ("norm before", "norm behind"):
        model = Decoder(KEYS, layout)
        groups = torch_groups(Parametrization(base=BASE), model, TUNED, roles_of(model), KEYS)
        rates.append([(group["role"], group["lr"]) for group in groups])
    assert rates[0] == rates[1]
    bare = Decoder(KEYS, "norm without gains")  # nothing can carry it: the model has to
    with pytest.raises(UsageError, match=r"no known effect in a weight: a norm \(QK-norm\) stands behind"):
        torch_groups(Parametrization(base=BASE), bare, TUNED, roles_of(bare), KEYS)
    own = Decoder(KEYS, "norm without gains", 8**0.5 / 16)
    assert torch_groups(Parametrization(base=BASE), own, TUNED, roles_of(own), KEYS)


def test_what_hides_the_logits_is_named():
    import torch
    from tests.scaling.attention_layouts import Decoder, Product, roles_of

    class Squared(Product):
        def forward(self, x):
            return super().forward(x) * self.weight.square().mean()

    model = Decoder(BASE, "einsum modules")
    model.blocks[0].q = Squared("btd,dhn->bhtn", BASE.width, 4, 8)
    said = measured(model, roles_of(model), BASE).logit.unknown
    assert said == ["blocks.0.q.weight: something is computed of it before it meets an activation"]
    model = Decoder(BASE, "einsum parameters")
    for block in model.blocks:  # queries from a product with another tensor, a copy or a nonlinear function
        block.project = lambda x, own=block: [
            torch.einsum("btd,dhn->bhtn", x, own.change(each)) for each in (own.wq, own.wk, own.wv)
        ]
    for change, said in (
        (lambda w: 0.5 * w, []),
        (torch.tanh, ["blocks.0.wq: something is computed of it before it meets an activation"]),
    ):
        for block in model.blocks:
            block.change = change
        found = measured(model, roles_of(model), BASE).logit
        assert found.unknown[:1] == said
        assert said or only(found) == pytest.approx(0.25 * 8**-0.5)


MISTAKES = {  # multipliers that the audit finds although the size that they should follow stays
    "logits over the root of H": ((1.0, 32**-0.5, 1.0), Shape(8, 32, 2), "multiplies its logits by 0.176777"),
    "logits over L": ((1.0, 8**-0.5 / 4, 1.0), DEPTH, "multiplies its logits by 0.0883883"),
    "branches over the root of H": ((8**-0.5, 8**-0.5, 1.0), HEADS, "multiplies its branches by 0.353553"),
    "branches over L": ((0.25, 16**-0.5, 1.0), KEYS, "multiplies its branches by 0.25"),
    "outputs over L": ((1.0, 8**-0.5, 0.25), DEPTH, "multiplies its outputs by 0.25"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_multipliers_are_judged_where_they_should_stay(mistake):
    forward, shape, said = MISTAKES[mistake]
    message = refusal(plain(shape, 7, 6, forward), PLAIN, shape)
    assert said in message
    assert "stays: if the base multiplies by this number as well" in message
    model = plain(shape, 7, 6, forward)
    assert torch_groups(Parametrization(base=BASE), model, TUNED, PLAIN, shape, ForwardMultipliers())


def test_layers_that_multiply_otherwise_than_those_before_are_refused():
    """Each number alone is one that a right model may have."""
    model = plain(KEYS, 7, 6)
    model.blocks[1] = plain(KEYS, 7, 6, (1.0, 1 / 16, 1.0)).blocks[1]
    assert "blocks.1.query multiplies its logits by 0.0625" in refusal(model, PLAIN, KEYS)


def test_a_number_that_one_shape_does_not_explain_is_noted():
    import torch

    p = Parametrization(base=BASE)
    for shape, logit, said in (
        (Shape(8, 8, 2), 8**-0.5, "logits: not judged whether they follow H^-1/2"),
        (HEADS, 1 / 8, "logits: not judged whether the base multiplies them by 0.125"),
    ):
        model = plain(shape, 7, 6, (1.0, logit, 1.0))
        rows = torch_groups(p, model, TUNED, PLAIN, shape)
        audit = audit_model(p, model, torch.optim.AdamW(rows), TUNED, PLAIN, shape, fresh=False)
        assert any(said in note for note in audit.notes), audit.notes
        assert "not judged: logits" in str(audit).splitlines()[0]


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("multiplier", [1.0, 64**0.5])
def test_a_multiplier_of_the_positions_is_measured_and_refused(first, multiplier):
    """Beside multiplied embeddings and a vector for all tokens; read from the first row of the table or the third."""
    import torch

    class Places(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.shift = torch.nn.Embedding(9, HEADS.width), torch.nn.Parameter(torch.randn(HEADS.width))

        def forward(self, tokens):
            return multiplier * self.table(first + torch.arange(tokens.shape[-1])) + self.shift

    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.places = plain(HEADS, 7, 6), Places().double()

        def forward(self, tokens):
            x = HEADS.width**0.5 * self.inner.embedding(tokens) + self.places(tokens)
            for block in self.inner.blocks:
                x = block(x)
            return self.inner.unembedding(self.inner.final_norm(x))

    model = Shifted()
    del model.inner.positions
    roles = {f"inner.{name}": part for name, part in PLAIN.items() if part != "positional"}
    roles |= {"places.table.weight": "positional", "places.shift": "embedding_bias"}
    found = measured(model, roles, HEADS)
    assert only(found.position) == pytest.approx(multiplier)
    assert only(found.embedding) == pytest.approx(8)
    if multiplier == 1:
        assert torch_groups(Parametrization(base=BASE), model, TUNED, roles, HEADS)
    else:
        said = refusal(model, roles, HEADS)
        assert "places.table multiplies its positions by 8, and folded=True expects 1 in every layer" in said
    same_width = refusal(model, roles, HEADS, Parametrization(base=Shape(16, 4, 2))) if multiplier != 1 else ""
    assert not same_width or "positions by 8, and 1 in every layer is expected, as D stays" in same_width


def test_a_family_whose_queries_are_normalized_without_gains_scales_its_logits_itself():
    """A factor in the weights before the norm has no effect: nanochat."""
    from tests.models import tiny

    from manyheads.scaling import scale_logits

    model = tiny.build("nanochat", key_dim=16, heads=4, layers=2, width=64, hidden=192, key_value_heads=2)
    p = Parametrization(base=Shape(8, 4, 2))
    with pytest.raises(UsageError, match=r"0\.7071 on the logits would have no effect .*: scale_logits\)"):
        torch_groups(p, model, TUNED)
    scale_logits(model, p)
    assert torch_groups(p, model, TUNED)

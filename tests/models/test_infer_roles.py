"""Roles inferred from a builder: models with roles by hand, families of the table, refusals, use as `roles=`."""

import json
import random
import string
from fnmatch import fnmatchcase

import pytest
from tests.models import tiny

from manyheads.errors import UsageError
from manyheads.models.families import FAMILIES
from manyheads.models.torch.model import ModelOptions, read_model
from manyheads.scaling import (
    BaseHyperparameters,
    MuonHyperparameters,
    Parametrization,
    audit_model,
    infer_roles,
    initialize_model,
    torch_groups,
)
from manyheads.scaling.torch.applied_factors import model_targets
from manyheads.transformer import Shape

pytestmark = pytest.mark.torch

BASE = (8, 4, 2)
TUNED = BaseHyperparameters(
    3e-3, weight_decay=0.1, no_decay=("norm", "final_norm"), muon=MuonHyperparameters(0.02)
)  # fmt: skip


def builder(kind):
    """A function of the shape alone."""
    return lambda shape: kind(shape.key_dim, shape.heads, shape.depth)


def infer(kind):
    import torch

    torch.set_num_threads(1)
    return infer_roles(builder(kind), BASE, getattr(kind, "example", None))


def expected(kind, names):
    """The parts that are written by hand, by name."""
    from tests.models.strange import roles_of

    roles = roles_of(kind)
    return {name: next(part for pattern, part in roles.items() if fnmatchcase(name, pattern)) for name in names}


def kinds(module, name):
    """The classes of a module that imports torch."""
    import importlib

    return getattr(importlib.import_module(f"tests.models.{module}"), name)


# Read rightly


@pytest.mark.parametrize(
    ("module", "group", "number"),
    [*(("own_models", "OWN", n) for n in range(3)), *(("strange", "READ", n) for n in range(8))],
)
def test_parts_are_those_written_by_hand(module, group, number):
    kind = kinds(module, group)[number]
    found = infer(kind)
    assert found.roles == expected(kind, found.roles)
    assert (found.shape.key_dim, found.shape.heads, found.shape.depth) == BASE
    assert infer(kind).as_dict() == found.as_dict()


@pytest.mark.parametrize("first", [True, False])
def test_the_encoder_of_torch_is_read_before_and_after_its_norms(first):
    from tests.models.own_models import Encoder

    found = infer_roles(lambda s: Encoder(s.key_dim, s.heads, s.depth, first), BASE)
    assert found.roles == expected(Encoder, found.roles)
    assert found.read_architecture(Encoder(8, 8, 2, first)).post_norm is not first


@pytest.mark.parametrize("number", range(3))
def test_names_are_not_read(number):
    """Every piece of a name but numbers is another word, in another order of the alphabet."""
    kind = kinds("own_models", "OWN")[number]
    drawn, words = random.Random(3), {}

    def rename(name):
        pieces = [
            piece if piece.isdigit() else words.setdefault(piece, "".join(drawn.sample(string.ascii_letters, 9)))
            for piece in name.split(".")
        ]
        return ".".join(pieces)

    def build(shape):
        model = builder(kind)(shape)
        plain = model.named_parameters
        model.named_parameters = lambda **options: ((rename(name), tensor) for name, tensor in plain(**options))
        return model

    plain, found = infer(kind), infer_roles(build, BASE)
    assert list(found.roles.values()) == list(plain.roles.values())
    assert not set(found.roles) & set(plain.roles)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, as the compiler is imported
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_compiled_model_in_low_precision_is_read(precision):
    import torch
    from tests.models.own_models import Fused

    found = infer_roles(lambda s: torch.compile(builder(Fused)(s).to(getattr(torch, precision))), BASE)
    assert list(found.roles.values()) == list(infer(Fused).roles.values())
    assert not any("_orig_mod" in name for name in found.roles)


# Multipliers


def test_multipliers_come_with_the_powers_that_they_follow():
    from tests.models.strange import OwnMultipliers

    found = infer(OwnMultipliers)
    assert found.multipliers == {
        "embedding": "5.65685 N^1/2 H^1/2", "logit": "0.375 N^-1", "branch output": "0.5 L^-1",
        "branch mlp_out": "0.5 L^-1", "output": "0.03125 N^-1 H^-1",
    }  # fmt: skip
    architecture = found.read_architecture(OwnMultipliers(16, 4, 8))
    assert vars(architecture.forward) == pytest.approx(
        {"branch": 0.25, "logit": 0.5, "output": 0.5, "embedding": 2**0.5}
    )


def test_a_factor_that_a_norm_without_gains_cancels_is_not_folded():
    from tests.models.strange import BareNorms

    found = infer(BareNorms)
    p = Parametrization(base=found.shape)
    with pytest.raises(
        UsageError, match=r"0\.7071 on the logits would have no effect in a weight: a norm without gains"
    ):
        torch_groups(p, BareNorms(16, 4, 2), TUNED, roles=found)
    assert torch_groups(p, BareNorms(8, 8, 4), TUNED, roles=found)


def test_a_factor_of_branches_behind_a_norm_without_gains_is_not_folded():
    from tests.models.strange import Model, Plain
    from torch.nn import functional as F

    class NormedEnds(Model):
        class Block(Plain):
            def forward(self, x):
                x = x + F.rms_norm(self.attention(self.one(x)), (self.d,))
                return x + F.rms_norm(self.mlp(self.two(x)), (self.d,))

    found = infer(NormedEnds)
    p = Parametrization(base=found.shape)
    with pytest.raises(UsageError, match=r"0\.5 on the branches would have no effect in a weight: a norm"):
        torch_groups(p, NormedEnds(8, 4, 4), TUNED, roles=found)
    assert torch_groups(p, NormedEnds(16, 8, 2), TUNED, roles=found)


def test_a_tied_table_behind_the_norms_of_blocks_has_nothing_that_carries_its_factor():
    from tests.models.strange import Model, Plain
    from torch.nn import functional as F

    class Tied(Model):
        class Block(Plain):
            def forward(self, x):
                x = self.one(x + self.attention(x))
                return self.two(x + self.mlp(x))

        def __init__(self, n, h, depth):
            super().__init__(n, h, depth)
            del self.read, self.last

        def forward(self, ids):
            return F.linear(self.body(F.embedding(ids, self.table)), self.table)

    found = infer(Tied)
    assert found.roles["table"] == "embedding+unembedding"
    with pytest.raises(UsageError, match=r"0\.5 behind it, which no parameter can carry: no norm of its own stands"):
        torch_groups(Parametrization(base=found.shape), Tied(8, 8, 2), TUNED, roles=found)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        (
            "granite",
            {
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.1,
                "logits_scaling": 4.0,
                "embedding_multiplier": 12.0,
            },
            {"logit": "0.1", "branch output": "0.22", "branch mlp_out": "0.22", "output": "0.25", "embedding": "12"},
        ),
        ("gemma", {}, {"logit": "0.353553 N^-1/2", "embedding": "5.65685 N^1/2 H^1/2"}),
        ("cohere", {"logit_scale": 0.0625}, {"output": "0.0625"}),
        ("gpt_neo", {}, {"logit": "1"}),
        ("bloom", {}, {"logit": "0.353553 N^-1/2", "output": "1"}),
    ],
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_multipliers_of_families_are_those_of_their_configuration(family, changes, said, attention):
    found = infer_roles(family_builder(family, attention, **changes), BASE)
    assert found.multipliers | said == found.multipliers


# Refused


@pytest.mark.parametrize("number", range(22))
def test_strange_models_are_refused(number):
    kind = kinds("strange", "REFUSED")[number]
    reason = {
        "SharedKeys": "blocks.0.wk.weight: one weight serves 2 attention layers; shared layers are not derived",
        "NormalizedWeights": "blocks.0.up.weight: something is computed of it before it meets an activation",
        "ScaledWeights": "up.weight is multiplied by 0.125 before a nonlinearity at build.16, 4, 2. and 0.176777 at",
        "SigmoidAttention": "a product of three activations without a softmax: linear attention",
        "TokenMixer": "blocks.0.up.weight: it sums over 7 numbers, and the stream has 32",
        "Prefixes": "blocks.0.keys: it is added to something that is neither stream, product, norm nor logits",
        "Highway": "gate.weight: it gates a branch and both its sides grow: it is no router",
        "SharedNorm": "blocks.0.one.weight: one norm serves several points of the stream",
        "SameQueries": "blocks.0.wk.weight: the same numbers are key and query",
        "FirstAgain": "two points of the stream are added, behind blocks.0.down.weight and embeddings",
        "DeepNorm": "the stream is multiplied by 1.5 between blocks",
        "GrowingHidden": "up.weight is multiplied by 0.353553 before a nonlinearity",
        "QueryPlaces": "blocks.0.where: it is added to blocks.0.wq.weight with a row for each position",
        "NormPlaces": "blocks.1.where: it is added to something that is neither stream, product, norm nor logits",
        "StreamGain": "blocks.0.keep: a trained factor without a norm before it has no role",
        "HiddenGain": "blocks.0.vector: a trained factor without a norm before it has no role",
        "QueryMlp": "blocks.0.wq.weight: a nonlinearity stands between two matrices of the query of attention",
        "HeadTemperature": "blocks.0.hot multiplies by one trained number; scalars have no role",
        "DeepPrompts": "blocks.1.tokens: it is added to something that is neither stream, product, norm nor logits",
        "SideAdapter": "layers of different sizes: one shape does not describe them",
        "BentValues": "blocks.0.wo.weight: a nonlinearity on the output of attention has no derivation",
        "FeatureSkips": "merge.weight: it sums over 64 numbers, and the stream has 32",
    }
    with pytest.raises(UsageError, match=reason[kind.__name__]):
        infer(kind)


@pytest.mark.parametrize("number", range(17))
def test_a_changed_gpt_is_read_or_refused(number):
    from tests.models.own_models import VARIANTS, variant

    change, reason = list(VARIANTS.items())[number]
    kind = variant(change)
    if reason:
        with pytest.raises(UsageError) as refused:
            infer(kind)
        assert reason in str(refused.value)
    else:
        found = infer(kind)
        assert found.roles == expected(kind, found.roles)


def test_a_builder_that_leaves_the_shape_alone_is_refused():
    kind = kinds("own_models", "Gpt")
    for build, sizes in (
        (lambda s: kind(s.key_dim, 4, s.depth), r"build\(8, 8, 2\) makes a model of N, H, L = 8, 4, 2"),
        (lambda s: kind(s.key_dim * s.heads // 4, 4, s.depth), r"build\(8, 8, 2\) makes a model of N, H, L = 16, 4, 2"),
        (lambda s: 3, "build returned int: expected a torch.nn.Module"),
    ):
        with pytest.raises(UsageError, match=sizes):
            infer_roles(build, BASE)


def test_examples_that_do_not_tell_are_refused():
    import torch

    kind = kinds("own_models", "Gpt")
    with pytest.raises(UsageError, match="no table is read by what differs between two sequences: give example="):
        infer_roles(builder(kind), BASE, (torch.ones(2, 5, dtype=torch.long),))
    with pytest.raises(UsageError, match=r"the forward pass did not run \(IndexError: .*\): give example="):
        infer_roles(builder(kind), BASE, {"ids": torch.full((2, 5), 99)})
    with pytest.raises(UsageError, match="table is on the device meta"):
        infer_roles(lambda s: builder(kind)(s).to("meta"), BASE)


def test_frozen_parameters_keep_their_roles_and_unused_ones_need_none():
    import torch

    kind = kinds("own_models", "Gpt")

    def build(shape, frozen=True):
        model = builder(kind)(shape)
        model.spare = torch.nn.Parameter(torch.zeros(3), requires_grad=not frozen)
        model.table.requires_grad = False
        return model

    found = infer_roles(build, BASE)
    with pytest.raises(
        UsageError, match="spare: not used in the traced forward pass; freeze it, remove it, or give an"
    ):
        infer_roles(lambda shape: build(shape, False), BASE)
    architecture = found.read_architecture(build(Shape(*BASE)))
    assert [each.parts for each in architecture.frozen] == [("embedding",)]
    assert "spare" not in {each.name for each in architecture.parameters}


OUTSIDE = {  # class of transformers, sizes by other names, what is said; nothing if it is read
    "T5ForConditionalGeneration": ({"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64}, "cross-attention: queries"),
    "AlbertForMaskedLM": ({"embedding_size": 16}, "between the embeddings and the stream, it has no role"),
    "MambaForCausalLM": ({"state_size": 4}, "no part of a block does"),
    "DebertaV2ForMaskedLM": (
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        "rel_embeddings.weight are combined before they meet an activation",
    ),
    "JetMoeForCausalLM": ({"kv_channels": 8, "num_local_experts": 4}, "heads chosen by data are not derived"),
    "Lfm2ForCausalLM": (
        {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
        "is a convolution inside the blocks",
    ),
    "EsmForMaskedLM": ({"mask_token_id": 3}, "contact_head.regression.weight: not used in the traced forward pass"),
    "HunYuanDenseV1ForCausalLM": ({"head_dim": 8}, ""),
    "CTRLLMHeadModel": ({"n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}, ""),
    "GraniteMoeForCausalLM": ({"num_local_experts": 4, "num_experts_per_tok": 2}, ""),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of DeBERTa in older versions
@pytest.mark.parametrize("name", OUTSIDE)
def test_families_outside_the_table_are_refused_or_read(name):
    """What is read is checked by hand: these parts, and no others."""
    import torch
    import transformers

    from manyheads.models.infer.traced_model import TracedModel

    changes, reason = OUTSIDE[name]
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    sizes |= {"vocab_size": 29, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    own = {"d_model", "n_embd"} & changes.keys() and {"vocab_size": 29, "num_layers": 2, "decoder_start_token_id": 0}
    kind = getattr(transformers, name)
    config = kind.config_class(**(own or sizes), **changes)
    config._attn_implementation = "eager"
    ids = torch.arange(2, 16).reshape(2, 7)
    given = {"input_ids": ids} | ({"decoder_input_ids": ids} if name.startswith("T5") else {})
    found = TracedModel(kind(config), given, frozenset())
    if reason:
        assert any(reason in each for each in found.reasons())
    else:
        assert found.reasons() == []
        parts = {part for each in found.parts.values() for part in each}
        assert {"embedding", "unembedding", "query", "key", "value", "output", "mlp_in", "mlp_out"} <= parts


# Families of the table


def family_builder(family, attention="eager", **changes):
    keys = FAMILIES[family].keys
    named = {**keys, **FAMILIES[family].counted}
    experts = [name for name in ("expert_hidden", "shared_hidden") if name in named and named[name].name]

    def build(shape):
        n, h = shape.key_dim, shape.heads
        groups = h if "plain_key_dim" in keys or "key_value_heads" not in keys else max(h // 2, 1)
        more = {"n_group": 1, "topk_group": 1} if family == "deepseek_v3" else {}
        more |= {"rotary_dim": n // 2} if family in ("gptj", "codegen") else {}
        if "plain_key_dim" in keys:
            more |= {"qk_nope_head_dim": n // 2, "qk_rope_head_dim": n // 2, "v_head_dim": n}
        more |= {named[name].name.split("|")[0]: 3 * n * h for name in experts}
        sizes = {"key_dim": n, "heads": h, "layers": shape.depth, "width": n * h, "hidden": 3 * n * h}
        model = tiny.build(family, **sizes, key_value_heads=groups, **more, **changes)
        model.config._attn_implementation = attention
        return model

    return build


REFUSED = {"dinov2": r"dinov2.embeddings.mask_token: not used in the traced forward pass"}
REFUSED |= dict.fromkeys(("granite_swa", "granitemoe_swa"), "a sum over features that does not make it a norm")  # sinks
REFUSED["mistral4"] = "in its logits, what is multiplied is not one number"  # queries scaled by their positions


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "apertus"])
def test_factors_of_every_family_are_those_of_its_table(family):
    import itertools
    import time

    tiny.skip_before((5, 23), family, "its experts are a loop, whose shares are no one number")
    build = family_builder(family)
    base = read_model(build(Shape(*BASE))).architecture
    start = time.process_time()
    if family in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[family]):
            infer_roles(build, BASE)
        return
    found = infer_roles(build, BASE)
    assert time.process_time() - start < 2
    for n, h in ((16, 8), (8, 16)):
        model = build(Shape(n, h, 2 if base.post_norm else 4))
        for (optimizer, exponent), table in itertools.product(
            (("adam", 1.0), ("adam", 0.5), ("sgd", 1.0), ("muon", 1.0)), (True, False)
        ):
            p = Parametrization(exponent, base=base.shape if table else found.shape, optimizer=optimizer)
            try:
                made = model_targets(p, model, TUNED, ModelOptions(None if table else found)).targets
                factors = {each.parameter.name: each.factors for each in made}
            except UsageError as error:
                factors = str(error)
            if table:
                expected = factors
            elif isinstance(expected, str):
                assert isinstance(factors, str)
                assert factors[:30] == expected[:30]
            else:
                assert factors.keys() == expected.keys()
                for name, each in expected.items():
                    assert factors[name].rule == each.rule
                    for number in ("initial", "learning_rate", "epsilon"):
                        assert getattr(factors[name], number) == pytest.approx(getattr(each, number), rel=1e-9)


# In the place of a role map


def test_groups_audit_and_init_take_what_was_inferred():
    import torch
    from tests.models.strange import Plain, roles_of

    kind = kinds("strange", "BiasedDistances")
    found, shape = infer(kind), Shape(8, 8, 4)
    p, stds = Parametrization(base=found.shape), dict.fromkeys(
        ("embedding", "query", "key", "value", "output", "mlp_in", "mlp_out", "unembedding", "sink"), 0.02
    )  # fmt: skip
    tuned = BaseHyperparameters(3e-3, stds=stds)
    model = builder(kind)(shape)
    initialize_model(p, model, tuned, roles=found)
    groups = torch_groups(p, model, tuned, roles=found)
    by_hand = torch_groups(p, model, tuned, roles_of(kind), shape)
    numbers = [{key: each[key] for key in ("lr", "eps", "weight_decay", "role", "names")} for each in groups]
    assert numbers == [{key: each[key] for key in numbers[0]} for each in by_hand]
    optimizer = torch.optim.AdamW([{k: v for k, v in each.items() if k not in ("names", "role")} for each in groups])
    assert audit_model(p, model, optimizer, tuned, roles=found).passed
    assert not audit_model(p, model, torch.optim.AdamW(model.parameters()), tuned, roles=found).passed
    with pytest.raises(UsageError, match=r"base=Shape\(key_dim=8, heads=2, depth=2\), and roles were inferred at"):
        torch_groups(Parametrization(base=Shape(8, 2, 2)), model, tuned, roles=found)
    with pytest.raises(UsageError, match="and the forward pass shows"):
        torch_groups(p, model, tuned, roles=found, shape=(8, 4, 4))
    assert issubclass(kind.Block, Plain)


def test_a_result_shows_itself_as_a_table():
    found = infer(kinds("own_models", "Parallel"))
    assert "21 parameters, Shape(key_dim=8, heads=4, depth=2, key_heads=2, hidden=96)" in repr(found)
    assert ["layers.*.wq", "query", "N", "H", "×", "H", "×", "N", "2"] in [
        line.split() for line in str(found).split("\n")
    ]
    assert found.sides["layers.0.wk"] == ("N H", "H", "N")
    assert found.notes == ("K 2: H", "F 96: N H")
    assert json.loads(json.dumps(found.as_dict()))["shape"]["key_heads"] == 2
    assert len(found.to_dataframe()) == 12

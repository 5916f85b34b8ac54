"""Folding against explicit multipliers; groups against mup; refusals by name."""

import importlib.util
from dataclasses import replace
from itertools import product

import pytest
from tests.scaling.torch_models import BASE, FAMILIES, FUSED, PLAIN, build, grown, plain, train

from manyheads.errors import UsageError
from manyheads.models.parts import CARRIES
from manyheads.scaling import BaseHyperparameters, Parametrization, audit_model, initialize_model, torch_groups
from manyheads.scaling.parametrization.targets import forward_multipliers
from manyheads.scaling.torch.groups import ModelOptions, read_model, scale_logits
from manyheads.transformer import Shape

pytestmark = pytest.mark.torch

START, GROWN = Shape(4, 2, 2), Shape(8, 3, 3)
TUNED = BaseHyperparameters(
    learning_rate=3e-3, epsilon=1e-3, weight_decay=0.1
)  # an epsilon of the size of gradients, so that it counts
VOCABULARY, LENGTH, STEPS = 7, 6, 6


@pytest.mark.parametrize(("optimizer", "tied"), list(product(("adam", "sgd"), (True, False))))
def test_folded_equals_explicit_multipliers(optimizer, tied, seed):
    """A tied embedding with d0/d folded into the last norm trains as one with that multiplier on its output."""
    import torch

    hyperparameters = TUNED if optimizer == "adam" else BaseHyperparameters(learning_rate=0.1, weight_decay=0.1)
    stds = dict.fromkeys(("embedding", "positional", "query", "key", "value", "output", "mlp_in", "mlp_out"), 0.3)
    hyperparameters = BaseHyperparameters(
        hyperparameters.learning_rate,
        hyperparameters.epsilon,
        hyperparameters.weight_decay,
        {**stds, "unembedding": 0.3},
    )
    p = Parametrization(richness=0.7, optimizer=optimizer, base=START)
    asked = forward_multipliers(p, GROWN)
    forward = (asked.branch, START.key_dim**-0.5 * asked.logit, asked.output)
    usual, explicit = (plain(GROWN, VOCABULARY, LENGTH, given, tied) for given in (None, forward))
    names = {pattern: part for pattern, part in PLAIN.items() if not (tied and pattern == "unembedding.bias")}
    curves = []
    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    for model, folded in ((usual, True), (explicit, False)):
        initialize_model(p, model, hyperparameters, names, GROWN, folded, torch.Generator().manual_seed(seed))
        groups = torch_groups(p, model, hyperparameters, names, GROWN, folded)
        kind = torch.optim.AdamW if optimizer == "adam" else torch.optim.SGD
        curves.append(train(model, kind(groups, lr=1.0), tokens, STEPS))
    if tied:
        assert curves[0][-1] < curves[0][0]
    assert curves[0] == pytest.approx(curves[1], rel=0, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_read_completely(family):
    model = build(family, BASE)
    read = read_model(model)
    assert replace(read.architecture.shape, key_heads=None, hidden=None) == BASE
    assert set(read.tensors) == {name for name, _ in model.named_parameters()}
    assert len(read.scales) == BASE.depth
    groups = torch_groups(Parametrization(base=BASE), model, TUNED)
    assert sum(len(group["params"]) for group in groups) == len(read.tensors)
    for group in groups:  # nothing changes at the base
        assert (group["lr"], group["eps"], group["weight_decay"]) == (
            TUNED.learning_rate,
            TUNED.epsilon,
            TUNED.weight_decay,
        )


def test_parts_of_names_that_are_easy_to_mistake():
    expected = {
        ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value.bias"): ("query_bias", "key_bias", "value_bias"),
        ("gpt_neox", "lm_head.weight"): ("unembedding",),
        ("llama", "model.layers.0.mlp.gate_proj.weight"): ("mlp_in",),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"): ("key_bias",),
        ("opt", "model.decoder.layers.0.final_layer_norm.weight"): ("mlp_gain",),
        ("opt", "model.decoder.final_layer_norm.weight"): ("final_gain",),
        ("bert", "bert.pooler.dense.weight"): ("hidden",),
        ("bert", "bert.embeddings.LayerNorm.bias"): ("embedding_shift",),
        ("bert", "bert.embeddings.token_type_embeddings.weight"): ("embedding",),
        ("bert", "cls.predictions.bias"): ("unembedding_bias",),
        ("bert", "bert.encoder.layer.0.output.dense.bias"): ("mlp_out_bias",),
        ("vit", "vit.embeddings.patch_embeddings.projection.bias"): ("embedding_bias",),
        ("vit", "vit.embeddings.cls_token"): ("marker",),
        ("vit", "classifier.weight"): ("unembedding",),
    }
    for family in {family for family, _ in expected}:
        parameters = {
            parameter.name: parameter for parameter in read_model(build(family, BASE)).architecture.parameters
        }
        for (own, name), parts in expected.items():
            if own == family:
                assert parameters[name].parts == parts
    parameters = read_model(build("bert", BASE)).architecture.parameters
    assert [parameter.name for parameter in parameters if parameter.closes] == [
        "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.LayerNorm.bias",
    ]


def run(family, model):
    """Return the outputs of a model on a fixed input."""
    import torch

    tokens = torch.arange(12).reshape(2, 6)
    if family == "vit":
        return model(torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)).logits
    return model(tokens).prediction_logits if family == "bert" else model(tokens).logits


def entries_of_queries(family, tensor):
    """Return a view of what belongs to the queries in a matrix or bias that may hold keys and values as well."""
    if family == "gpt2":  # (d, 3 d), and (3 d,)
        return tensor[..., : BASE.width]
    if family == "gpt_neox":  # head after head: its query, key, value
        return tensor.view(BASE.heads, 3, BASE.key_dim, *tensor.shape[1:])[:, 0]
    return tensor


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_reach_what_they_are_folded_for(family, seed):
    """Queries times c are a logit scale times c; the norm before a tied read-out times c multiplies the outputs."""
    import torch

    torch.manual_seed(seed)
    model = build(family, BASE).eval()
    read = read_model(model)
    with torch.no_grad():
        for tensor in read.tensors.values():
            tensor.copy_(0.3 * torch.randn(tensor.shape) + (tensor.dim() == 1))
        if family == "bert":
            model.cls.predictions.bias.zero_()  # stands behind the factor
        before = run(family, model)
        for name in read.scales:
            model.get_submodule(name).scaling *= 1.7
        scaled = run(family, model)
        for name in read.scales:
            model.get_submodule(name).scaling /= 1.7
        queries = [
            entries_of_queries(family, read.tensors[parameter.name])
            for parameter in read.architecture.parameters
            if CARRIES.get(parameter.parts[0]) == "logit"
        ]
        for entries in queries:
            entries *= 1.7
        torch.testing.assert_close(run(family, model), scaled, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(scaled, before, rtol=1e-2)
        for entries in queries:
            entries /= 1.7
        closing = [parameter.name for parameter in read.architecture.parameters if parameter.closes]
        assert bool(closing) == any(parameter.tied for parameter in read.architecture.parameters)
        for name in closing:
            read.tensors[name] *= 3
        if closing:
            torch.testing.assert_close(run(family, model), 3 * before, rtol=1e-3, atol=1e-3)


def test_fused_queries_need_the_models_own_logit_scale():
    keys = Shape(2 * BASE.key_dim, BASE.heads, BASE.depth)
    p = Parametrization(base=BASE)
    for family in FUSED:
        model = build(family, keys)
        with pytest.raises(UsageError, match=r"(c_attn|query_key_value)\.weight holds query, key, value.*scale_logits"):
            torch_groups(p, model, TUNED)
        assert scale_logits(model, p) == BASE.depth
        group = next(group for group in torch_groups(p, model, TUNED) if group["role"] == "query+key+value")
        assert group["lr"] == pytest.approx(TUNED.learning_rate / 2)
        with pytest.raises(UsageError, match="split the parameter"):  # at 1/2 queries and values differ in rate
            torch_groups(Parametrization(0.5, base=BASE), build(family, keys), TUNED)


def test_a_logit_scale_of_its_own_replaces_the_folding(seed):
    import torch

    shape = Shape(2 * BASE.key_dim, BASE.heads, BASE.depth)
    p, tokens = Parametrization(base=BASE), torch.arange(24).reshape(2, 12)
    curves = []
    for own in (False, True):
        model = build("llama", shape).double()
        if own:
            scale_logits(model, p)
        hyperparameters = BaseHyperparameters(3e-3, 1e-4, stds={"query": 0.3, "key": 0.3})
        initialize_model(p, model, hyperparameters, generator=torch.Generator().manual_seed(seed))
        optimizer = torch.optim.AdamW(torch_groups(p, model, hyperparameters), lr=1.0)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0] == pytest.approx(curves[1], rel=0, abs=1e-5)  # RMS norms compute in single precision
    model.model.layers[1].self_attn.scaling = 0.4
    with pytest.raises(UsageError, match=r"layers\.1\.self_attn multiplies its logits by 0\.4.*scale_logits"):
        torch_groups(p, model, TUNED)


@pytest.mark.parametrize(
    ("family", "shape", "changes", "message"),
    [
        ("gpt2", BASE, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=False"),
        ("gpt2", BASE, {"scale_attn_weights": False}, "scale_attn_weights=True"),
        ("gpt2", BASE, {"add_cross_attention": True}, "crossattention.*never guessed.*roles="),
        ("opt", BASE, {"word_embed_proj_dim": 12}, "word_embed_proj_dim.*make it 32"),
        ("opt", Shape(8, 8, 2), {"do_layer_norm_before": False}, "no norm of its own.*tie_word_embeddings=False"),
        ("opt", Shape(8, 8, 2), {"layer_norm_elementwise_affine": False}, r"cannot|can carry"),
        ("gpt2", Shape(8, 8, 2), {"model": "GPT2DoubleHeadsModel"}, "another head reads the same norm"),
        ("bert", Shape(8, 4, 4), {}, "post-norm.*outside the theory"),
    ],
)
def test_models_outside_the_theory_are_refused_by_name(family, shape, changes, message):
    with pytest.raises(UsageError, match=message):
        torch_groups(Parametrization(base=BASE), build(family, shape, **changes), TUNED)


def test_other_models_are_refused():
    import torch
    import transformers

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    shared = transformers.AlbertConfig(**sizes, vocab_size=9, embedding_size=8)
    p = Parametrization(base=BASE)
    with pytest.raises(UsageError, match=r"'albert' is not described: all its layers share.*roles="):
        torch_groups(p, transformers.AlbertForMaskedLM(shared), TUNED)
    with pytest.raises(UsageError, match=r"Linear has no configuration.*roles="):
        torch_groups(p, torch.nn.Linear(2, 2), TUNED)
    with pytest.raises(UsageError, match=r"no torch\.nn\.Module"):
        torch_groups(p, object(), TUNED)
    with pytest.raises(UsageError, match=r"the width cannot be read off.*give roles= and shape="):
        torch_groups(p, torch.nn.Linear(2, 2, bias=False), TUNED, {"weight": "query"})
    with pytest.raises(UsageError, match=r"fits the parameter 'bias'"):
        torch_groups(p, torch.nn.Linear(2, 2), TUNED, {"weight": "query"}, BASE)
    small = Parametrization(base=Shape(2, 1, 1))
    with pytest.raises(UsageError, match=r"no std is known for query"):
        initialize_model(small, torch.nn.Linear(2, 2, bias=False), TUNED, {"weight": "query"}, small.base)
    with torch.device("meta"):
        empty = build("llama", BASE)
    with pytest.raises(UsageError, match=r"holds no numbers.*to_empty"):
        initialize_model(p, empty, TUNED)


def test_frozen_parameters_wrappers_and_padding(seed):
    import torch

    model = build("opt", BASE)
    model.model.decoder.embed_positions.weight.requires_grad_(False)
    before = model.model.decoder.embed_positions.weight.clone()
    p = Parametrization(base=BASE)
    wrapped = torch.nn.Module()
    wrapped.module = model
    names = [name for group in torch_groups(p, wrapped, TUNED) for name in group["names"]]
    assert "model.decoder.embed_positions.weight" not in names
    assert len(names) == len(list(model.parameters())) - 1
    initialize_model(p, wrapped, TUNED, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(model.model.decoder.embed_positions.weight, before)
    table = model.model.decoder.embed_tokens.weight
    assert not table[1].any()
    assert table[2].any()
    drawn = table.clone()
    initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(drawn, table)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch itself, where its compiler is imported
def test_wrapped_parts_are_looked_through(seed):
    """Wrapping blocks one by one, or the body alone, puts a wrapper's name in the middle of the parameters' names."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    p, shape = Parametrization(base=BASE), Shape(16, 4, 2)
    plainly = build("llama", shape)
    scale_logits(plainly, p)
    expected = [(group["role"], group["lr"], group["names"]) for group in torch_groups(p, plainly, TUNED)]
    blocks, body = build("llama", shape), build("llama", shape)
    for number, block in enumerate(blocks.model.layers):
        blocks.model.layers[number] = checkpoint_wrapper(block)
    body.model = torch.compile(body.model)
    for model in (blocks, body):
        assert scale_logits(model, p) == shape.depth
        assert model.model.layers[1].self_attn.scaling == plainly.model.layers[1].self_attn.scaling
        initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
        groups = torch_groups(p, model, TUNED)
        assert [(group["role"], group["lr"], group["names"]) for group in groups] == expected
        assert audit_model(p, model, torch.optim.AdamW(groups), TUNED).passed


def test_models_of_which_nothing_or_little_is_trained():
    import torch

    p, shape = Parametrization(base=BASE), Shape(16, 4, 2)
    model = build("qwen2", shape)
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="Qwen2ForCausalLM has no trained parameter"):
        torch_groups(p, model, TUNED)
    model.model.layers[0].self_attn.q_proj.bias.requires_grad_(True)
    with pytest.raises(UsageError, match=r"a frozen table is embedding and unembedding at once"):
        torch_groups(p, model, TUNED)
    model = build("llama", shape)
    for block in model.model.layers:
        block.self_attn.q_proj.weight.requires_grad_(False)
    assert scale_logits(model, p) == shape.depth  # of frozen queries as well
    assert audit_model(p, model, torch.optim.AdamW(torch_groups(p, model, TUNED)), TUNED, fresh=False).passed


def test_torch_takes_the_groups_as_they_are():
    import torch

    model = build("qwen2", Shape(8, 8, 3))
    for optimizer, kind in (("adam", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)):
        groups = torch_groups(Parametrization(base=BASE, optimizer=optimizer), model, TUNED)
        made = kind(groups, lr=TUNED.learning_rate)
        assert [row["lr"] for row in made.param_groups] == [group["lr"] for group in groups]
        assert len({row["role"] for row in made.param_groups}) > 5


def test_width_only_groups_against_their_published_form():
    """mup by hand: Adam's matrices at lr d0/d and the rest at lr; SGD's vectors at lr d/d0; decay one over it."""
    wide = Shape(2 * START.key_dim, 3 * START.heads, START.depth)
    ratio, model = 6, plain(Shape(8, 6, 2), VOCABULARY, LENGTH)
    matrices = ("query", "key", "value", "output", "mlp_in", "mlp_out")
    for optimizer in ("adam", "sgd"):
        p = Parametrization.mup(START, optimizer)
        applied = forward_multipliers(p, wide)
        for group in torch_groups(p, model, BaseHyperparameters(0.1, 1e-8, 0.2), PLAIN, wide, applied):
            matrix = group["role"] in matrices
            if optimizer == "adam":
                factor = 1 / ratio if matrix else 1.0
                assert group["eps"] == 1e-8
            else:
                factor = 1.0 if matrix or group["role"] == "unembedding_bias" else ratio
            assert group["lr"] == pytest.approx(0.1 * factor, rel=1e-12), group["role"]
            assert group["weight_decay"] == pytest.approx(0.2 / factor, rel=1e-12)


def distance_from_mup(optimizer, shape):
    """Largest relative difference of rates and decays between mup's groups and ours, over all parameters."""
    import mup

    def make(shape):
        model = plain(shape, VOCABULARY, LENGTH)
        model.unembedding = mup.MuReadout(shape.width, VOCABULARY).double()
        return model

    model = make(shape)
    at_base = Shape(START.key_dim, START.heads, shape.depth)
    mup.set_base_shapes(model, make(at_base), delta=make(Shape(2 * START.key_dim, 2 * START.heads, shape.depth)))
    given = {"lr": 0.1, "weight_decay": 0.2}
    made = (mup.MuAdamW if optimizer == "adam" else mup.MuSGD)(model.parameters(), **given)
    theirs = {id(t): (row["lr"], row["weight_decay"]) for row in made.param_groups for t in row["params"]}
    p = Parametrization.mup(START, optimizer)
    ours = torch_groups(p, model, BaseHyperparameters(0.1, 1e-8, 0.2), PLAIN, shape, forward_multipliers(p, shape))
    assert sum(len(group["params"]) for group in ours) == len(theirs)
    pairs = [((group["lr"], group["weight_decay"]), theirs[id(t)]) for group in ours for t in group["params"]]
    return max(abs(one / other - 1) for pair in pairs for one, other in zip(*pair, strict=True))


@pytest.mark.skipif(importlib.util.find_spec("mup") is None, reason="the package 'mup' is not installed")
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_width_only_groups_are_those_of_mup(optimizer):
    for shape in (Shape(START.key_dim, 3 * START.heads, 2), Shape(4 * START.key_dim, START.heads, 3)):
        assert distance_from_mup(optimizer, shape) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_every_class_of_every_family_scales_by_the_table(family):
    """Undo the foldings by hand and compare with the table of the house."""
    for shape in grown(family):
        p = Parametrization(base=BASE)
        table = p.table(shape)
        branch, logit = table.branch, (shape.key_dim / BASE.key_dim) ** -0.5
        output = BASE.width / shape.width
        read = read_model(build(family, shape))
        parts = {parameter.name: parameter for parameter in read.architecture.parameters}
        model = build(family, shape)
        for group in torch_groups(p, model, TUNED):
            if "hidden" in group["role"]:
                continue
            for name in group["names"]:
                parameter = parts[name]
                c = {"output": branch, "mlp_out": branch, "query": logit}.get(
                    parameter.parts[0].removesuffix("_bias"), 1.0
                )
                c = output if parameter.closes else c
                row = table[group["role"].partition("+")[0]]
                assert group["lr"] == pytest.approx(TUNED.learning_rate * row.learning_rate * c), name
                assert group["eps"] == pytest.approx(TUNED.epsilon * row.epsilon / c), name
                assert group["lr"] * group["weight_decay"] == pytest.approx(TUNED.learning_rate * TUNED.weight_decay)


def test_a_shape_that_the_matrices_contradict_is_refused():
    p, model = Parametrization(base=START), plain(Shape(4, 3, 4), VOCABULARY, LENGTH)
    assert torch_groups(p, model, TUNED, PLAIN, Shape(4, 3, 4))
    with pytest.raises(UsageError, match=r"query\.weight \(query\) has the sides \(12, 12\).*stream of width 24"):
        torch_groups(p, model, TUNED, PLAIN, Shape(8, 3, 4))
    with pytest.raises(UsageError, match="4 query matrices and L = 3 layers"):
        torch_groups(p, model, TUNED, PLAIN, Shape(4, 3, 3))


def test_reading_may_repeat_the_shape_but_not_contradict_it():
    model = build("llama", BASE)
    assert read_model(model, ModelOptions(shape=BASE)).architecture.shape == Shape(8, 4, 2, key_heads=2, hidden=64)
    with pytest.raises(UsageError, match="leave shape out"):
        read_model(model, ModelOptions(shape=Shape(4, 8, 2)))

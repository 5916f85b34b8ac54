"""Statistics against float64 on the same queries and keys: error laws, exact largest logits, sampled rows."""

import numpy as np
import pytest

from manyheads.probe.attention.datasets import draw_rows, estimate_mean

EPS = 2.0**-23


def measure_errors(n, sharp, masked, sunk, seed):
    """Return the largest errors of both ways against float64 on the same queries and keys, and the largest |logit|.

    Logits and entropies in units of eps max(1, max |s|, |beta|), the collision probability relative, distances by n.
    """
    import torch

    from manyheads.probe.attention.fused import fused_statistics
    from manyheads.probe.attention.interface import AttentionCall
    from manyheads.probe.attention.row_statistics import row_statistics

    torch.set_num_threads(1)
    B, H, d = 2, 4, 16
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(B, H, n, d, generator=generator) * sharp
    key = torch.randn(B, H // 2, n, d, generator=generator)
    sink = torch.tensor([-5.0, 0.0, 3.0, 20.0]) if sunk else None
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    mask = (causal & causal.triu(-n // 5))[None, None].repeat(B, 1, 1, 1) if masked else None
    if masked:
        mask[1, ..., :9] = False  # padding on the left
    call = AttentionCall(query, key, 0.25, not masked, mask, None, None, sink, False)

    allowed = causal.expand(B, 1, n, n) if mask is None else mask
    logits = (query.double() @ key.double().repeat_interleave(2, 1).mT * 0.25).masked_fill(~allowed, -torch.inf)
    every = logits if sink is None else torch.cat([logits, sink.double().view(1, H, 1, 1).expand(B, H, n, 1)], -1)
    p = every.softmax(-1)
    counted = allowed.diagonal(dim1=-2, dim2=-1)
    exact = {"entropy": -torch.xlogy(p, p).sum(-1), "collision": (p * p).sum(-1), "logsumexp": every.logsumexp(-1)}
    exact["first_mass"] = torch.gather(p, -1, allowed.int().argmax(-1)[..., None].expand(B, H, n, 1))[..., 0]
    exact["mean_logit"] = (logits.softmax(-1) * logits.masked_fill(~allowed, 0)).sum(-1)  # over the keys alone
    exact["distance"] = torch.arange(n) - logits.softmax(-1) @ torch.arange(n, dtype=torch.double)
    if sunk:
        exact["sink_mass"] = p[..., -1]
    peak = float(logits[allowed.expand_as(logits)].abs().max())
    unit = EPS * max(1.0, peak, 20.0 * sunk)
    largest = torch.where(counted[..., None], logits, -torch.inf).amax((0, 2, 3))

    by_rows, levels, seen = row_statistics(call, torch.arange(n))
    fused, levels_fused, seen_fused, found = fused_statistics(call, ("collision", "max_logit", "distance"))
    assert torch.equal(seen.expand(B, 1, n), counted)
    assert torch.equal(seen_fused.expand(B, 1, n), counted)
    assert all(torch.equal(levels[name], level) for name, level in levels_fused.items())
    errors = {"peak": peak}
    units = {"sink_mass": 1.0, "distance": n * unit}
    found_by_rows = torch.where(counted, by_rows["max_logit"], -torch.inf).amax((0, 2))
    for way, statistics, top in (("rows", by_rows, found_by_rows), ("fused", fused, found)):
        errors[f"{way} max_logit"] = float(((top - largest) / largest).abs().max())
        for name, value in exact.items():
            off = (statistics[name] - value).abs() / (value if name == "collision" else units.get(name, unit))
            errors[f"{way} {name}"] = float(torch.where(counted, off, 0.0).max())
    return errors


IN_UNITS = ("entropy", "logsumexp", "mean_logit", "first_mass", "distance")
LIMITS = {
    f"{way} {name}": limit
    for way, factor in (("rows", 4), ("fused", 6))
    for name, limit in {
        **dict.fromkeys(IN_UNITS, factor),
        "sink_mass": 2e-6,
        "collision": 5e-5,
        "max_logit": 1e-6,
    }.items()
}


@pytest.mark.torch
@pytest.mark.parametrize("sharp", [0.3, 3, 50])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sunk", [False, True])
def test_errors_keep_the_law(sharp, masked, sunk, seed):
    """Within 4 (rows) or 6 (fused) eps max(1, max |s|, |beta|); sinks to 2e-6, collision to 5e-5 relative."""
    errors = measure_errors(96, sharp, masked, sunk, seed)
    errors.pop("peak")
    assert {name: error for name, error in errors.items() if error > LIMITS[name]} == {}


@pytest.mark.torch
def test_a_rule_and_a_mask_of_numbers_are_read_as_booleans_are():
    """As flex attention and plain attention pass them; other numbers than those of a mask are a bias."""
    from types import SimpleNamespace

    import torch

    from manyheads.probe.attention.interface import read_call
    from manyheads.probe.attention.row_statistics import row_statistics

    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    rule = SimpleNamespace(mask_mod=lambda batch, head, row, column: column <= row)
    numbers = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    slope = torch.where(allowed, 0.1 * torch.arange(6), torch.finfo(torch.float32).min)

    def statistics(implementation, mask):
        call = read_call(implementation, "attn", SimpleNamespace(), (query, key, key, mask), {"scaling": 0.5})
        return call, row_statistics(call, torch.arange(6))[0]

    expected = statistics("sdpa", allowed)[1]
    for implementation, mask in (("sdpa", None), ("eager", numbers), ("flex_attention", rule)):
        found = statistics(implementation, mask)[1]
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    call, found = statistics("eager", slope)
    assert not call.fusable
    logits = (query @ key.repeat_interleave(2, 1).mT * 0.5 + 0.1 * torch.arange(6)).masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(found["logsumexp"], logits.logsumexp(-1))
    assert statistics("eager", None)[0].causal is False


@pytest.mark.torch
def test_sdpa_leaves_soft_caps_and_sinks_out_as_its_kernel_does():
    """Of transformers 5.15; later kernels refuse soft-caps."""
    from contextlib import suppress
    from types import SimpleNamespace

    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from manyheads.probe.attention.interface import read_call
    from manyheads.probe.attention.row_statistics import row_statistics

    query, key = 10 * torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    keywords = {"scaling": 0.5, "softcap": 1.0, "s_aux": torch.zeros(2)}
    module = SimpleNamespace(is_causal=True, num_key_value_groups=1)
    plain = sdpa_attention_forward(module, query, key, key, None, scaling=0.5)[0]
    sunk = sdpa_attention_forward(module, query, key, key, None, scaling=0.5, s_aux=keywords["s_aux"])[0]
    assert torch.equal(sunk, plain)
    with suppress(ValueError):  # later kernels refuse
        assert torch.equal(sdpa_attention_forward(module, query, key, key, None, **keywords)[0], plain)
    call = read_call("sdpa", "attn", module, (query, key, key, None), keywords)
    logits = (query @ key.mT * 0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(row_statistics(call, torch.arange(6))[0]["logsumexp"], logits.logsumexp(-1))
    call = read_call("eager", "attn", module, (query, key, key, torch.zeros(1, 1, 6, 6)), keywords)
    assert (call.softcap, call.sink.tolist()) == (1.0, [0.0, 0.0])


def test_sampled_rows_are_the_first_and_one_of_each_stratum(rng):
    sample = draw_rows(1000, 64, rng)
    assert sample.index[:17].tolist()[:16] == list(range(16))
    assert (np.diff(sample.index) > 0).all()
    assert sample.weight.sum() == 1000
    assert draw_rows(64, 64, rng).whole
    assert draw_rows(64, None, rng).whole
    assert not draw_rows(65, 64, rng).whole


def test_estimates_are_unbiased_and_intervals_cover(rng):
    """Curves that fall over the rows, with noise and padding: 95% intervals of 64 rows cover 90 to 100%."""
    n, batch, heads, draws = 400, 3, 40, 60
    row = np.arange(n)
    curves = np.exp(-row / rng.uniform(5, 300, (batch, heads, 1))) + 0.3 * rng.normal(size=(batch, heads, n))
    counted = np.ones((batch, 1, n))
    counted[1, :, 300:] = 0
    sums, counts = (curves * counted).sum(0), counted.sum(0)
    truth, error = estimate_mean(sums, counts, draw_rows(n, None, rng))
    assert not error.any()
    np.testing.assert_allclose(truth, sums.sum(-1) / counts.sum())
    scores = []
    for _ in range(draws):
        sample = draw_rows(n, 64, rng)
        mean, error = estimate_mean(sums[:, sample.index], counts[:, sample.index], sample)
        scores.append((mean - truth) / error)
    scores = np.array(scores)
    assert np.mean(np.abs(scores) < 1.96) >= 0.90
    assert 0.8 < scores.std() < 1.2  # 0.96 to 0.99 over four seeds
    assert abs(scores.mean()) < 5 * scores.std() / np.sqrt(scores.size) + 0.05


def test_rows_that_never_count_have_no_mean(rng):
    sample = draw_rows(100, 16, rng)
    mean, error = estimate_mean(np.zeros((2, 16)), np.zeros((1, 16)), sample)
    assert np.isnan(mean).all()
    assert np.isnan(error).all()

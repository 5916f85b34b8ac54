r"""Learned attention sinks: statistics with a further logit beta in the softmax, from those of the keys alone.

With :math:`x = \mathrm{lse} - \beta` and :math:`g = \sigma(x)`, the mass on the keys,

.. math:: H' = g H + h(g), \quad h(g) = \log(1 + e^x) - g x, \quad \mathrm{lse}' = \log(e^{\mathrm{lse}} + e^\beta),

the collision probability is :math:`g^2 C + (1-g)^2`, the mass on the first key g P, and the sink holds 1 - g.
"""

from manyheads.models.torch.lazy_torch import Tensor, torch


def fold_sink(statistics: dict[str, Tensor], sink: Tensor) -> dict[str, Tensor]:
    """Include a learned sink.

    From statistics of the keys alone (B, H, r) and the sink's logit (H,) or (1,): the same names with the sink
    included, `sink_mass`, and `key_entropy`, the entropy among the keys. Logits and distances are those of the keys.
    """
    beta = sink.view(1, -1, 1)
    lse = statistics["logsumexp"]
    x = lse - beta
    mass = torch.sigmoid(x)
    rest = torch.sigmoid(-x)
    if "collision" in statistics:
        statistics = statistics | {"collision": mass * mass * statistics["collision"] + rest * rest}
    return statistics | {
        "entropy": mass * statistics["entropy"] + torch.nn.functional.softplus(x) - mass * x,
        "logsumexp": torch.logaddexp(lse, beta.expand_as(lse)),
        "first_mass": mass * statistics["first_mass"],
        "sink_mass": rest,
        "key_entropy": statistics["entropy"],
    }

"""Looking at a transformer while it trains: what it loses, how widely its heads look, how many directions it uses."""

import equinox as eqx
import jax
import jax.numpy as jnp

from manyheads.attention import attention_entropy, causal
from manyheads.spectra import traced_stable_rank
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.transformer import Transformer


@eqx.filter_jit
def look_at(model: Transformer, held_out: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    """Measure loss, entropy of every head, and the stable ranks of the lower MLP matrix and of query times key.

    Parameters
    ----------
    model
        The transformer in training.
    held_out
        Windows and the characters that follow, both (B, T).

    Returns
    -------
    dict
        `validation_loss` (), `entropy` (L, H) as the mean over windows and positions, `stable_rank` (L,),
        `query_key_rank` (L, H).
    """
    layers = model.record(held_out[0]).layers
    scale = model.scaling.logit(model.config.shape.key_dim)
    entropy, _ = attention_entropy(layers.queries, layers.keys, scale=scale, mask=causal)  # (L, B, H, T)
    blocks = model.weights.blocks
    product = jnp.einsum("lhdn,lhen->lhde", blocks.query, blocks.key)  # (L, H, d, d)
    return {
        "validation_loss": cross_entropy(model, held_out),
        "entropy": entropy.mean((1, 3)),
        "stable_rank": traced_stable_rank(blocks.mlp_in),
        "query_key_rank": traced_stable_rank(product),
    }

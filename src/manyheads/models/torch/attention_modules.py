"""Attention modules of transformers: head size, number of heads and norm of the queries, by the names in use there."""

from manyheads.models.torch.lazy_torch import Module

QUERY_NORMS = ("q_norm", "q_layernorm", "query_norm", "query_layernorm", "qk_norm")
KEY_NORMS = ("k_norm", "k_layernorm", "key_norm", "key_layernorm", "qk_norm")
HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads")


def query_norm(module: Module) -> Module | None:
    """Return the module that normalizes queries before the logits; None if there is none."""
    return _first_norm(module, QUERY_NORMS)


def query_key_norms(module: Module) -> tuple[Module, Module] | None:
    """Return the modules that normalize queries and keys before the logits; None unless there are both."""
    query, key = _first_norm(module, QUERY_NORMS), _first_norm(module, KEY_NORMS)
    return None if query is None or key is None else (query, key)


def head_size(module: Module) -> int | None:
    """Return the number of components of a head, N; None if the module does not say."""
    return _first_integer(module, HEAD_SIZES)


def head_count(module: Module) -> int | None:
    """Return the number of query heads, H; None if neither the module nor its configuration says."""
    return _first_integer(module, HEAD_COUNTS) or _first_integer(getattr(module, "config", None), HEAD_COUNTS)


def _first_norm(module: Module, names: tuple[str, ...]) -> Module | None:
    found = (getattr(module, name, None) for name in names)
    return next((norm for norm in found if norm is not None and type(norm).__name__ != "Identity"), None)


def _first_integer(owner: object, names: tuple[str, ...]) -> int | None:
    return next((found for name in names if isinstance(found := getattr(owner, name, None), int)), None)

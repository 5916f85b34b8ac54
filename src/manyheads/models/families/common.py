"""Heads and keys that several families share."""

from manyheads.models.modules import MAYBE, NEVER, Condition, Key, Module, Role


def head(path: str, role: Role = Role.CLASSIFIER, sort: str = "linear", bias: Condition = MAYBE) -> Module:
    """Return a module on top of the body, which may be absent."""
    return Module(path, role, sort, when=MAYBE, bias=bias)


CLASSIFIERS = (head("score", bias=NEVER), head("classifier"), head("qa_outputs"))
LANGUAGE_HEAD = head("lm_head", Role.UNEMBEDDING, "table")


def sizes(width: int, heads: int, layers: int) -> dict[str, Key]:
    """Return the keys of width, heads and layers under their usual names."""
    return {
        "width": Key("hidden_size", width),
        "heads": Key("num_attention_heads", heads),
        "layers": Key("num_hidden_layers", layers),
    }


def gpt_sizes(width: int, heads: int, layers: int, tied: bool) -> dict[str, Key]:
    """Return the keys of GPT-2 and those named after it."""
    return {
        "width": Key("n_embd|hidden_size", width),
        "heads": Key("n_head|num_attention_heads", heads),
        "layers": Key("n_layer|num_hidden_layers", layers),
        "eps": Key("layer_norm_epsilon", 1e-5),
        "tied": Key("tie_word_embeddings", tied),
    }


def mlp(hidden: int | None, vocabulary: int, activation: str = "gelu") -> dict[str, Key]:
    """Return the keys of the MLP and the vocabulary under their usual names."""
    return {
        "mlp_hidden": Key("intermediate_size", hidden),
        "vocabulary": Key("vocab_size", vocabulary),
        "activation": Key("hidden_act|hidden_activation", activation),
    }

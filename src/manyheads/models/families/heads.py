"""Heads of models: the dense layers above the body, by the class that a configuration names."""

from collections.abc import Mapping
from typing import NamedTuple

from manyheads.models.config import ModelConfig
from manyheads.models.modules import ALWAYS, NEVER, Condition, Role


class HeadLayer(NamedTuple):
    """One layer of a head: its role, the sides of its weight, when it has a bias, and on which positions it acts.

    `once` is true for a layer that acts on one position of each sequence, such as the class token.
    """

    role: Role
    sides: str
    bias: Condition = ALWAYS
    once: bool = False


_POOLER = HeadLayer(Role.POOLER, "width,width", once=True)
_CLASSES = HeadLayer(Role.CLASSIFIER, "labels,width", once=True)
_ENDS: dict[str, tuple[HeadLayer, ...]] = {
    "ForImageClassificationWithTeacher": (_CLASSES, _CLASSES),
    "ForImageClassification": (_CLASSES,),
    "ForTokenClassification": (_CLASSES._replace(once=False),),
    "ForQuestionAnswering": (HeadLayer(Role.CLASSIFIER, "2,width"),),
}
_ENCODER_ENDS = _ENDS | {
    "ForSequenceClassification": (_POOLER, _CLASSES),
    "ForMultipleChoice": (_POOLER, _CLASSES._replace(sides="1,width")),
    "ForNextSentencePrediction": (_POOLER, _CLASSES._replace(sides="2,width")),
    "ForPreTraining": (_POOLER, _CLASSES._replace(sides="2,width")),
}
_DECODER_ENDS = _ENDS | {
    "ForSequenceClassification": (_CLASSES._replace(bias=NEVER, once=False),),
    "DoubleHeadsModel": (_CLASSES._replace(sides="1,width"),),
}
_DENSE = (
    HeadLayer(Role.HEAD_TRANSFORM, "width,width", "classifier_bias"),
    HeadLayer(Role.HEAD_NORM, "width", "norm_bias"),
)
_DENSE_ONCE = tuple(layer._replace(once=True) for layer in _DENSE)
_FAMILY_ENDS: Mapping[str, Mapping[str, tuple[HeadLayer, ...]]] = {
    "dinov2": {"ForImageClassification": (_CLASSES._replace(sides="labels,2*width"),)},
    "electra": {"ForPreTraining": (_POOLER._replace(once=False), _CLASSES._replace(sides="1,width", once=False))},
    "modernbert": {
        "ForSequenceClassification": (*_DENSE_ONCE, _CLASSES),
        "ForMultipleChoice": (*_DENSE_ONCE, _CLASSES._replace(sides="1,width")),
        "ForTokenClassification": (*_DENSE, _CLASSES._replace(once=False)),
        "ForQuestionAnswering": (*_DENSE, HeadLayer(Role.CLASSIFIER, "2,width")),
    },
    "opt": {
        "ForSequenceClassification": (HeadLayer(Role.CLASSIFIER, "labels,embedding_width", NEVER),),
        "ForQuestionAnswering": (HeadLayer(Role.CLASSIFIER, "2,embedding_width"),),
    },
    "ijepa": {"Model": ()},
}


def has_language_head(config: ModelConfig) -> bool:
    """Tell whether logits over the vocabulary are computed: by the class that is named, else for causal families."""
    if not config.raw.get("architectures"):
        return config.family.causal is True
    return bool(config.family.language_heads) and config.built_with(*config.family.language_heads)


def head_layers(config: ModelConfig) -> tuple[HeadLayer, ...] | None:
    """Return the layers of the head beside those of a language head; None for a class that is not described."""
    family = config.family
    if family.model_type == "vit_mae" and config.built_with("ForPreTraining"):
        return None  # a decoder of its own
    ends = {**(_DECODER_ENDS if family.causal is True else _ENCODER_ENDS), **_FAMILY_ENDS.get(family.model_type, {})}
    if (found := next((layers for end, layers in ends.items() if config.built_with(end)), None)) is not None:
        return found
    if has_language_head(config) or not config.raw.get("architectures"):
        return ()
    pooled = any(module.role is Role.POOLER for module in family.body)
    return ((_POOLER,) if pooled else ()) if config.built_with("Model") else None


def describe_head(config: ModelConfig) -> tuple[str, ...]:
    """Return the notes on the head, where it is assumed or not counted."""
    if head_layers(config) is None:
        return (f"body only: the head of {config.raw['architectures'][0]:.60} is not described",)
    if config.raw.get("architectures"):
        return ()
    return (
        f"no class is named in architectures: {'a language' if has_language_head(config) else 'no'} head is counted",
    )

"""Chapters of the demo as data: one study each, in the order in which they are shown.

A theory adds a chapter by adding a row. A chapter on the trained transformers of the demo finds the folder of their run
in the `Scene`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.study import Study


@dataclass(frozen=True)
class Scene:
    """Inputs of a chapter."""

    text: Path | None  # None for Python's documentation
    finished: dict[str, Path]  # folders of the runs of earlier chapters, by the name of the study


@dataclass(frozen=True)
class Chapter:
    """Heading, text and study of one chapter; the study is built when the earlier chapters are finished."""

    title: str
    lead: str
    study: Callable[[Scene], Study]
    replicates: int


def _made(place: str, **settings: Any) -> Callable[[Scene], Study]:
    """Return what builds a study of this library, with the text and the trainings of the demo where it reads them."""

    def build(scene: Scene) -> Study:
        from manyheads.study.registry import load

        kind, run = load(f"manyheads.{place}"), scene.finished.get("demo/text")
        read = {"text": scene.text, "finished": run and run / "run.json"}
        return kind(**{name: value for name, value in read.items() if hasattr(kind, name)}, **settings)

    return build


def _lags(scene: Scene) -> Study:
    from manyheads.data import load_text
    from manyheads.studies.bigram.lags import PlantedLags

    most = len(load_text(scene.text).content)  # pieces of a short text overlap
    sizes = tuple(sorted({min(size, most) for size in (3000, 12_000)}))
    return PlantedLags(text=scene.text, sizes=sizes, lags=16)


SHORT_RECALL = {"lengths": (8, 24), "steps_per_token": 40, "batch": 32, "learning_rate": 4e-3}
CHAPTERS: tuple[Chapter, ...] = (
    Chapter(
        "A transformer learns to write",
        "A causal transformer is trained on a text, character by character. Its loss is compared with that of "
        "n-gram models, and the entropy of every attention head is recorded from uniform attention on.",
        _made("demo.text:TextTraining"),
        replicates=4,
    ),
    Chapter(
        "Drop and rebound",
        "The theory of the joint dynamics of attention and MLP predicts that the attention entropy of a layer drops"
        " while it learns the most salient tokens, and rebounds later. This is tested for each layer of the same "
        "trainings.",
        _made("demo.entropy_rebound:DemoRebound"),
        replicates=4,
    ),
    Chapter(
        "Its weights from its outputs",
        "The upper attention layer of the same transformers, behind its LayerNorm and its residual connection, is "
        "queried as a black box. Its weights are computed from the outputs, head by head. The result is certified "
        "on fresh sequences and compared with the transformer on real text.",
        _made("demo.extraction:Extraction"),
        replicates=4,
    ),
    Chapter(
        "Order-blindness",
        "Three networks with equally many weights recall the symbol after a marker. Pooling ignores order, and the "
        "best accuracy without order is known exactly. A recurrent network carries the symbol to the end, attention"
        " reads it where it stands.",
        _made("studies.attention.order_blindness:OrderBlindness", **SHORT_RECALL),
        replicates=4,
    ),
    Chapter(
        "Which earlier characters predict the next one?",
        "A sparse contextual bigram is fitted to the same text: one transition matrix, read at a few lags that "
        "depend on the character. It shows on which earlier positions the next character depends, beside the mutual"
        " information of every position, and is tested on planted lags.",
        _lags,
        replicates=4,
    ),
    Chapter(
        "Hyperparameters of a larger model",
        "A learning rate that is tuned at one size is not tuned at twice the heads and depth. The theory of "
        "infinite limits gives the init std, the learning rate and the multiplier of each weight at the new size. "
        "Models are trained here with these and without.",
        _made("demo.scaling:DemoScaling"),
        replicates=6,
    ),
    Chapter(
        "The limit of infinite key dimension",
        "In the limit of infinite key dimension the training of an attention block does not depend on the draw of "
        "its initialization and can be computed by mean-field theory, without training or fit. This is compared "
        "with trained blocks of growing size.",
        _made("demo.growth:DemoGrowth"),
        replicates=8,
    ),
    Chapter(
        "The smallest self-attention network that is chaotic",
        "A self-attention layer that appends its own output to its context is a dynamical system. Here tokens and "
        "weights are bits, with one feature, equal weights for all neurons and a context of two tokens. With one "
        "token in the context softmax has no choice, and the network cannot be chaotic. With two it is: runs that "
        "start from the same token and differ by the noise of their neurons only lose each other, however many neurons "
        "they have. The largest Lyapunov exponent, the rate at which they do, is computed from the Jacobian of the "
        "mean field and measured on nearby orbits.",
        _made("demo.chaos:DemoChaos"),
        replicates=4,
    ),
    Chapter(
        "The cost of attention",
        "FLOPs of the compiled programs against closed forms, sequential depth, and measured time.",
        _made("studies.attention.costs:Costs", lengths=(64, 256, 1024)),
        replicates=3,
    ),
)

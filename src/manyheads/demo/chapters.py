"""The chapters of the demo, as data: a study each, in the order in which they are shown.

A theory adds its chapter by adding a row. A chapter that looks at the demo's own trained transformer finds the folder
of its run in the `Scene`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyheads.study import Study


@dataclass(frozen=True)
class Scene:
    """What a chapter may look at.

    Attributes
    ----------
    text
        The text that the demo trains on; None for Python's documentation.
    finished
        The folders of the runs of the chapters before, by the study's name.
    """

    text: Path | None
    finished: dict[str, Path]


@dataclass(frozen=True)
class Chapter:
    """One chapter: what is asked, and the study that answers, made from the scene.

    Attributes
    ----------
    title, lead
        Heading and the sentences under it.
    study
        Makes the study; called when the chapters before are finished.
    replicates
        How many systems are trained.
    """

    title: str
    lead: str
    study: Callable[[Scene], Study]
    replicates: int


def _text(scene: Scene) -> Study:
    from manyheads.demo.text import TextTraining

    return TextTraining(text=scene.text)


def _rebound(scene: Scene) -> Study:
    from manyheads.demo.rebound import Rebound

    run = scene.finished.get("demo/text")
    return Rebound(finished=run and run / "run.json")


def _extraction(scene: Scene) -> Study:
    from manyheads.demo.extraction import Extraction

    run = scene.finished.get("demo/text")
    return Extraction(text=scene.text, finished=run and run / "run.json")


def _order(scene: Scene) -> Study:
    from manyheads.attention.studies.order_blindness import OrderBlindness

    return OrderBlindness(lengths=(8, 20), steps_per_token=40, batch=32, rate=4e-3)


def _costs(scene: Scene) -> Study:
    from manyheads.attention.studies.costs import Costs

    return Costs(lengths=(64, 256, 1024))


def _lags(scene: Scene) -> Study:
    from manyheads.bigram.studies.lags import PlantedLags
    from manyheads.data import load_text

    most = len(load_text(scene.text).content)  # of a short text the pieces overlap, but there are never more of them
    return PlantedLags(text=scene.text, sizes=tuple(sorted({min(size, most) for size in (3000, 12_000)})), lags=16)


def _scaling(scene: Scene) -> Study:
    from manyheads.demo.scaling import Scaling

    return Scaling(text=scene.text)


def _growth(scene: Scene) -> Study:
    from manyheads.demo.growth import Growth

    return Growth(text=scene.text)


CHAPTERS: tuple[Chapter, ...] = (
    Chapter(
        "A transformer learns to write",
        "A causal transformer is trained on a text, character by character. What it knows is measured against models "
        "that count: how often each character follows the few before it. Its heads begin by looking at everything "
        "alike, and then choose.",
        _text,
        replicates=4,
    ),
    Chapter(
        "Drop and rebound",
        "The same trainings, looked at again. A theory of how attention learns together with the MLP above it predicts "
        "that a layer first narrows its view to what matters most and later widens it again. Here each "
        "layer is asked.",
        _rebound,
        replicates=4,
    ),
    Chapter(
        "Its weights, from its answers",
        "The upper attention layer of the same transformers, behind its LayerNorm and its residual connection, is only "
        "asked: sequences go in, answers come out. From these its weights are computed, head by head. Fresh sequences "
        "certify how far the result can be trusted, and real text, about which it was never asked, checks it.",
        _extraction,
        replicates=4,
    ),
    Chapter(
        "What is order worth?",
        "Three networks with equally many weights must name the symbol that stands after a marker. Pooling throws the "
        "order away, and how well anything can do without order is known exactly. Recurrence has to carry the answer "
        "to the end. Attention looks it up.",
        _order,
        replicates=4,
    ),
    Chapter(
        "Which earlier characters count?",
        "No transformer this time: one matrix says what a character makes of the next one, and every character has a "
        "few lags at which it looks that matrix up. Fitted to the same text, this shows on which earlier positions the "
        "next character depends, beside the mutual information of every position. Whether it can be believed is tested "
        "on lags that were planted.",
        _lags,
        replicates=4,
    ),
    Chapter(
        "What would a larger model need?",
        "With twice the heads and twice the depth the same learning rate is another one: every weight moves the stream "
        "farther. A theory of infinite limits says for each weight with which spread it should start and at which rate "
        "it should learn, so that training goes on as in the small model. Both are trained here, with and without it.",
        _scaling,
        replicates=6,
    ),
    Chapter(
        "And an infinitely large one?",
        "The larger an attention block is, the less its training depends on the numbers that it was started with. In "
        "the limit there is one course, and it can be computed without training anything. That is done here for a "
        "small block and a few pieces of the text, and nothing is fitted. Then blocks of growing size are trained.",
        _growth,
        replicates=8,
    ),
    Chapter(
        "What does attention cost?",
        "FLOPs counted on the programs that run, against closed forms; how many products wait for each other; and the "
        "time it takes, because FLOPs are not time.",
        _costs,
        replicates=3,
    ),
)

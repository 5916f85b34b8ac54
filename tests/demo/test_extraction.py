"""The chapter on extraction: the demo's own transformers are asked, and their weights come back."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest

from manyheads.data.characters import read_characters
from manyheads.demo import extraction as chapter
from manyheads.demo.chapters import CHAPTERS, Scene
from manyheads.demo.extraction import Extraction, block_oracle
from manyheads.demo.text import TextTraining, stored_weights
from manyheads.errors import UsageError
from manyheads.recovery.refusals import VerificationError
from manyheads.study import check_study, run
from manyheads.study.tables import record
from manyheads.transformer.transformer import initialize

SMALL = TextTraining(key_dim=8, heads=2, depth=1, length=16, batch=2, steps=3, snapshots=3)


@pytest.fixture
def study(monkeypatch, tmp_path):
    """Return the study on a run of which only the weights exist: training them would cost more than all tests here."""

    class Trainings:
        header: ClassVar = {"inputs": TextTraining().inputs(), "configuration": asdict(SMALL)}

    def read(finished, study, key):
        return record(stored_weights(jax.jit(lambda key: SMALL._model(key, len(read_characters()[0])).weights)(key)))

    monkeypatch.setattr(chapter, "open_trainings", lambda finished: Trainings)
    monkeypatch.setattr(chapter, "finished_study", lambda finished: replace(SMALL, text=None))
    monkeypatch.setattr(chapter, "training_of", read)
    (tmp_path / "run.json").write_text("a stand-in")
    return Extraction(finished=tmp_path / "run.json", layer=0)


@pytest.mark.slow
def test_it_keeps_the_contract(study, seed):
    check_study(study, 2, seed)


@pytest.mark.slow
def test_what_is_asked_is_what_the_transformer_computes(study, seed, tmp_path):
    tree = run(study, 2, seed, store=tmp_path / "runs", progress=False)
    one = tree["trained"].to_dataset().isel(cell=0)
    for outcome, heads, error in zip(*(one[name].values for name in ("outcome", "heads", "text_error")), strict=True):
        # Refusals are allowed of transformers that never learned anything; a wrong layer is not. The transformer
        # itself computes in single precision.
        assert outcome != "extracted" or (heads == 2 and error < 1e-9)
    assert "extracted" in one["outcome"].values
    assert list(tree["verdicts"]["expected"].values) == [""] * 3  # a smaller transformer than the demo's


def test_a_refusal_is_a_result_and_no_claim_holds(study, seed, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise VerificationError("no such layer", measured=1.0, threshold=1e-6)

    monkeypatch.setattr(chapter, "extract_layer", refuse)
    tree = run(study, 2, seed, store=tmp_path / "runs", progress=False)
    assert set(tree["trained"]["outcome"].values.ravel()) == {"VerificationError"}
    assert list(tree["verdicts"]["outcome"].values[:2]) == ["refuted"] * 2
    panels = study.panels(tree["predicted"].to_dataset(), tree["trained"].to_dataset())
    assert [row[1] for row in panels[0].rows] == ["VerificationError"] * 2


def test_other_trainings_are_refused(study, tmp_path):
    (tmp_path / "other.txt").write_text("another text " * 200)
    with pytest.raises(UsageError, match="another text"):
        Extraction(text=tmp_path / "other.txt", finished=study.finished, layer=0).inputs()
    with pytest.raises(UsageError, match="layers are numbered from 0"):
        Extraction(finished=study.finished, layer=1).predict(None)


def test_the_chapter_asks_the_transformers_that_were_trained_before():
    row = next(row for row in CHAPTERS if row.study(Scene(None, {})).name == Extraction.name)
    asked = row.study(Scene(None, {"demo/text": Path("somewhere")}))
    assert asked.finished == Path("somewhere/run.json")
    trained = next(row for row in CHAPTERS if row.study(Scene(None, {})).name == TextTraining.name)
    assert row.replicates <= trained.replicates


def test_a_transformer_of_another_form_is_not_asked():
    from manyheads.transformer.config import TransformerConfig
    from manyheads.transformer.inputs import TokenInput
    from manyheads.transformer.scaling import standard_scaling
    from manyheads.transformer.shape import Shape

    config = TransformerConfig(Shape(2, 2, 1), TokenInput(5), length=3, outputs=5, norm="none")
    model = initialize(config, standard_scaling(config.shape, config.inputs), jax.random.key(0), np.float32)
    with pytest.raises(UsageError, match="pre-norm"):
        block_oracle(model, 0)

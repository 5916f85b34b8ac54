"""The demo's training: what it measures, and that it learns nothing from the text it is tested on."""

import re

import jax
import jax.numpy as jnp
import pytest

from manyheads.data import TextWindows, load_text
from manyheads.data.characters import read_characters
from manyheads.demo.chapters import CHAPTERS, Scene
from manyheads.demo.text import TextTraining, continue_text, find_prose, trained_model
from manyheads.errors import UsageError
from manyheads.study import Study, run
from manyheads.theory.joma.text.record import held_out_starts, record_statistics

SMALL = TextTraining.small()


@pytest.fixture(scope="module")
def model(seed):
    return SMALL._model(jax.random.key(seed), len(read_characters(None)[0]))


def test_the_prompt_is_the_window_with_the_most_letters(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a1" * 2000 + "... 123 " * 30 + "letters only " * 3 + "... 123 " * 20)
    vocabulary, (_, validation) = read_characters(path)
    assert "e" not in vocabulary.symbols or "letters" in vocabulary.decode(find_prose(vocabulary, validation, 20))


@pytest.mark.slow
def test_writing_is_a_function_of_the_key(model):
    prompt = jnp.zeros(16, jnp.int32)
    first, second, other = (continue_text(model, prompt, jax.random.key(k), 12) for k in (0, 0, 1))
    assert first.shape == (12,)
    assert (first == second).all()
    assert (first != other).any()


def test_another_text_is_another_run_and_a_missing_one_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some text " * 100)
    assert TextTraining(text=path).inputs()["text"] != TextTraining().inputs()["text"] == load_text().sha256
    with pytest.raises(UsageError, match=r"absent\.txt"):
        TextTraining(text=tmp_path / "absent.txt").inputs()


def test_chapters_are_studies_with_enough_replicates_to_decide():
    for chapter in CHAPTERS:
        study = chapter.study(Scene(None, {}))
        assert isinstance(study, Study)
        assert chapter.replicates >= 3
        assert chapter.title
        assert chapter.lead.endswith(".")


@pytest.mark.slow
def test_a_trained_model_comes_back_from_its_run(trained):
    trained = trained["trained"].to_dataset()
    _, (_, validation) = read_characters(None)
    held_out = TextWindows(validation, 16, 2).cut(jnp.asarray(held_out_starts(validation, 16, 3)))
    for replicate in range(2):
        loss = float(record_statistics(trained_model(SMALL, trained, replicate), held_out)["validation_loss"])
        assert loss == pytest.approx(
            float(trained["validation_loss"].isel(cell=0, replicate=replicate, step=-1)), rel=1e-6
        )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 0}, "steps=0"),
        ({"heads": 0}, "heads=0"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"batch": -1}, "batch"),
    ],
)
def test_sizes_that_mean_nothing_are_refused_before_work(fields, words):
    with pytest.raises(UsageError, match=words):
        TextTraining(**fields)


def test_a_text_too_short_for_the_windows_is_refused_before_work(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("short " * 50)
    with pytest.raises(UsageError, match="30 held-out characters") as caught:
        run(TextTraining(text=path), 1, store=tmp_path / "runs", progress=False)
    assert not (tmp_path / "runs").exists()
    asked = int(re.search(r"more than (\d+) characters", str(caught.value))[1])
    longer = tmp_path / "longer.txt"
    longer.write_text("s" * (asked + 1))
    assert TextTraining(text=longer).inputs()["text"]

"""Order of checkpoints by all numbers in their names."""

import itertools

import pytest
import safetensors.numpy

from manyheads.errors import UsageError
from manyheads.probe import verify_checkpoints as verify
from manyheads.probe.checkpoints.series import read_order, sort_by_step

ORDERED = [
    ["stage1-step900", "stage1-step100000", "stage2-step1000", "stage2-step2000"],
    ["step2000-tokens9B", "step10000-tokens42B", "step100000-tokens1T"],
    ["epoch_1-iter_900", "epoch_2-iter_100", "epoch_10-iter_5"],
    ["global_step9", "global_step80", "global_step700"],
    ["run/stage1/step5000", "run/stage2/step10", "run/stage10/step1"],
    ["epoch=0-step=90-val_loss=2.75.ckpt", "epoch=1-step=180-val_loss=2.31.ckpt"],
    ["tokens500M", "tokens2B", "tokens2.5B"],
    ["stage-1-phase-1-checkpoint-90", "stage-1-phase-2-checkpoint-8", "stage-2-phase-1-checkpoint-7"],
    ["stage1-step5-tokens1B", "stage2-ingredient1-step5-tokens1B"],
    ["9", "10", "100"],
]
NOT_ORDERED = [
    (["stage2-ingredient1-step1000", "stage2-ingredient2-step2000"], "ingredient 1 and 2"),
    (["step10-tokens2B", "step20-tokens1B"], "larger step"),
    (["step10", "stage2-step5"], "one names a stage"),
    (["step10", "step20-tokens3B"], "one names a token"),
    (["seed1/step10", "seed2/step20"], "seed 1 and 2"),
]


@pytest.mark.parametrize("names", ORDERED)
def test_all_numbers_of_a_name_count(names):
    for given in itertools.islice(itertools.permutations(names), 24):
        found = read_order(given)
        assert (found.sources, found.conflict) == (names, None)
        assert found.steps == sorted(set(found.steps))


@pytest.mark.parametrize(("names", "why"), NOT_ORDERED)
def test_names_that_do_not_tell_the_order_are_a_finding_that_names_both(names, why, tmp_path, rng):
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        safetensors.numpy.save_file({"w": rng.normal(size=(4, 4))}, tmp_path / name / "model.safetensors")
    paths = [tmp_path / name for name in names]
    (found,) = [each for each in verify(paths[::-1]).findings if each.kind == "step"]
    assert why in found.evidence
    assert all(name.rpartition("/")[2] in found.where for name in names)
    with pytest.raises(UsageError, match=why) as error:
        sort_by_step(paths)
    assert all(name in str(error.value) for name in names)


def test_a_later_stage_follows_whatever_its_steps(tmp_path, rng):
    weights, names = rng.normal(size=(40, 40)), ["stage1-step500", "stage1-step1000", "stage2-step10", "stage2-step500"]
    for place, name in enumerate(names):
        weights = weights + rng.normal(size=(40, 40)) / (place + 1)
        safetensors.numpy.save_file({"w": weights}, tmp_path / f"{name}.safetensors")
    found = verify(sorted(tmp_path.iterdir(), reverse=True))
    assert [name.removesuffix(".safetensors") for name in found.checkpoints] == names
    assert found.passed
    assert not any("steps" in each for each in found.unchecked)


OF_OTHER_STAGES = [
    ("stageA-step500", "stageB-step100"),
    ("stage-I-step500", "stage-II-step100"),
    ("stage_one/step500", "stage_two/step100"),
    ("pretrain/step5000", "sft/step100"),
    ("pretrain-step1000", "anneal-step100"),
    ("warmup-step10", "step30"),
    ("step1000", "step1000-ema"),
]


@pytest.mark.parametrize("names", OF_OTHER_STAGES)
def test_stages_that_no_number_orders_are_a_conflict(names):
    for given in (names, names[::-1]):
        assert read_order(given).conflict is not None
        with pytest.raises(UsageError, match="do not say which is later"):
            sort_by_step(given)


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (("2024-01-06_step100", "2024-01-05_step200"), [100, 200]),
        (("step_000100_lr_0.001", "step_000200_lr_0.0005"), [100, 200]),
        (("100_steps", "200_steps"), [100, 200]),
        (("5steps", "10steps", "1k-steps"), [5, 10, 1000]),
        (("500M-tokens", "1B-tokens"), [500_000_000, 1_000_000_000]),
        (("step1,000", "step2,000"), [1000, 2000]),
        (("epoch1-step100_tokens5B", "epoch1-step200_tokens9B"), [100, 200]),
        (("step1e2", "step1e3"), [100, 1000]),
        (("step1e999", "step2"), None),
    ],
)
def test_dates_rates_and_words_behind_numbers_are_read(names, steps):
    found = read_order(names if steps is None else names[::-1])
    assert (found.sources, found.steps, found.conflict) == (list(names), steps, None)

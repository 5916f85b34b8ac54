import hashlib

import numpy as np
import pytest

from manyheads.data.digits import cut_patches, load_digits, normalize, select_pair
from manyheads.errors import ShapeError, UsageError


def test_the_data_are_the_published_ones():
    digits = load_digits()
    # Counts of the ten digits and of all samples in the test part of the published data set.
    assert np.bincount(digits.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert digits.images.shape == (1797, 8, 8)
    assert (digits.images.min(), digits.images.max()) == (0, 16)
    # First row of the published file optdigits.tes.
    first = "0 0 5 13 9 1 0 0 0 0 13 15 10 15 5 0 0 3 15 2 0 11 8 0 0 4 12 0 0 8 8 0 "
    first += "0 5 8 0 0 9 8 0 0 4 11 0 1 12 7 0 0 2 14 5 10 12 0 0 0 0 6 13 10 0 0 0"
    assert digits.images[0].ravel().tolist() == [int(pixel) for pixel in first.split()]
    assert hashlib.sha256(digits.images.tobytes()).hexdigest().startswith("8f26b2bd9d135c25")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_patches_by_loops(size):
    images = load_digits().images[:5]
    patches = cut_patches(images, size)
    for sample in range(5):
        token = 0
        for top in range(0, 8, size):
            for left in range(0, 8, size):
                assert np.array_equal(
                    patches[sample, token], images[sample, top : top + size, left : left + size].ravel()
                )
                token += 1
    assert patches.shape[1] == token


def test_pair_keeps_order_and_signs():
    digits = load_digits()
    pair = select_pair(digits, 3, 5)
    kept = np.isin(digits.labels, [3, 5])
    assert np.array_equal(pair.images, digits.images[kept])
    assert np.array_equal(pair.labels == 1, digits.labels[kept] == 5)


def test_normalize_keeps_the_contrast_between_images():
    images = load_digits().images
    values = normalize(images, np.float32)
    assert values.dtype == np.float32
    line = np.polyfit(images.ravel().astype(float), values.ravel().astype(float), 1)
    assert np.allclose(np.polyval(line, images), values, atol=1e-5)


def test_wrong_use_is_refused():
    digits = load_digits()
    for pair in ((3, 3), (3, 10)):
        with pytest.raises(UsageError, match="two different labels"):
            select_pair(digits, *pair)
    for images, size in ((digits.images, 3), (digits.images[0], 4), (digits.images[:, :4], 4), (digits.images, 0)):
        with pytest.raises(ShapeError, match="patches"):
            cut_patches(images, size)
    with pytest.raises(UsageError, match="equal"):
        normalize(np.ones((2, 8, 8)))

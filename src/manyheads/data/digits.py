"""Handwritten digits of 8 x 8 pixels.

The 1,797 images are the test part of *Optical Recognition of Handwritten Digits*, E. Alpaydin and C. Kaynak (1998), UCI
Machine Learning Repository, doi:10.24432/C50P49, licence Creative Commons Attribution 4.0 (CC BY 4.0). They are stored
unchanged, as bytes.
"""

from dataclasses import dataclass
from importlib import resources

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads._extras import Num
from manyheads._overview import ArraysAsShapes
from manyheads.errors import ShapeError, UsageError


@dataclass(frozen=True, repr=False)
class Digits(ArraysAsShapes):
    """Images and what they show."""

    images: np.ndarray  # (samples, 8, 8); as loaded uint8 from 0 (paper) to 16 (ink)
    labels: np.ndarray  # (samples,), int32


def load_digits() -> Digits:
    """Load all 1,797 digits in their original order.

    Examples
    --------
    >>> digits = load_digits()
    >>> digits.images.shape, digits.images.dtype, int(digits.images.max()), digits.labels[:5].tolist()
    ((1797, 8, 8), dtype('uint8'), 16, [0, 1, 2, 3, 4])
    """
    source = resources.files("manyheads.data") / "digits.npz"
    with source.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        return Digits(archive["images"], archive["labels"].astype(np.int32))


def select_pair(digits: Digits, negative: int, positive: int) -> Digits:
    """Keep two of the ten digits and label them -1 and +1.

    Examples
    --------
    >>> pair = select_pair(load_digits(), 3, 5)
    >>> pair.images.shape, sorted(set(pair.labels.tolist()))
    ((365, 8, 8), [-1, 1])
    """
    known = sorted(set(digits.labels.tolist()))
    if negative == positive or negative not in known or positive not in known:
        raise UsageError(f"the pair ({negative}, {positive}): give two different labels out of {known}")
    kept = (digits.labels == negative) | (digits.labels == positive)
    return Digits(digits.images[kept], np.where(digits.labels[kept] == positive, 1, -1).astype(np.int32))


@takes_arrays
def normalize(images: np.ndarray, dtype: np.typing.DTypeLike = np.float64) -> np.ndarray:
    """Shift and scale by one mean and one standard deviation for all pixels of all images."""
    values = np.asarray(images, np.float64)
    std = values.std()
    if std == 0:
        raise UsageError("all pixels are equal: there is nothing to normalize")
    return ((values - values.mean()) / std).astype(dtype)


@takes_arrays
def cut_patches(
    images: "Num[np.ndarray, 'samples side side']", size: int = 4
) -> "Num[np.ndarray, 'samples patches pixels']":
    """Cut images (samples, side, side) into patches (samples, (side/size)^2, size^2), row by row: one token a patch.

    Raises `ShapeError`: the images are not square, or `size` does not divide their side.

    Examples
    --------
    >>> cut_patches(load_digits().images, 4).shape
    (1797, 4, 16)
    """
    if images.ndim != 3 or images.shape[1] != images.shape[2] or size < 1 or images.shape[1] % size:
        raise ShapeError(f"images {images.shape} in patches of side {size}: give (samples, side, side), size | side")
    samples, count = len(images), images.shape[1] // size
    grid = images.reshape(samples, count, size, count, size).transpose(0, 1, 3, 2, 4)
    return grid.reshape(samples, count**2, size**2)

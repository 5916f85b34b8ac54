r"""Small vision transformers on digits with real and with shuffled labels, and how simple each image is.

The simplicity of an image i of label y is the margin by which the means of the classes, without the image, decide it:

.. math:: m_i = \min_{c \ne y} |x_i - \bar x_c|^2 - |x_i - \bar x_y^{(-i)}|^2

It is positive where a classifier that is linear in the pixels is right. When an image is learned is told by the time
for which it is classified wrongly.
"""

from functools import lru_cache

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Int

from manyheads._arrays import takes_arrays
from manyheads.data import load_digits
from manyheads.data.digits import cut_patches, normalize
from manyheads.data.draws import draw_integers
from manyheads.errors import ShapeError
from manyheads.theory.joma.text.variants import layer_statistics
from manyheads.transformer import Shape, Transformer, TransformerConfig
from manyheads.transformer.inputs import PatchInput

CLASSES, PATCH = 10, 2  # digits; side of a patch, 16 of which make an image


@lru_cache(maxsize=4)
def labelled_digits(samples: int, shuffled: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the first images as patches (samples, 16, 4), and their labels, in one fixed random order if shuffled."""
    digits = load_digits()
    patches = cut_patches(normalize(digits.images, np.float32), PATCH)[:samples]
    labels = digits.labels[:samples]
    return patches, np.random.default_rng(0).permutation(labels) if shuffled else labels


def digit_config(width: int, heads: int, depth: int) -> TransformerConfig:
    """Configure a pre-norm vision transformer with ReLU that pools its tokens."""
    places = (8 // PATCH) ** 2
    return TransformerConfig(
        Shape(width // heads, heads, depth), PatchInput(PATCH**2), length=places, outputs=CLASSES, activation="relu"
    )


class LabelledImages(eqx.Module):
    """Batches (images, labels), drawn with replacement."""

    images: Float[Array, "samples patches pixels"]
    labels: Int[Array, " samples"]
    size: int = eqx.field(static=True)

    def __call__(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draw a batch."""
        chosen = draw_integers(key, (self.size,), len(self.labels))
        return self.images[chosen], self.labels[chosen]


@eqx.filter_jit
def image_statistics(model: Transformer, images: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Measure which images are classified rightly, entropy and stable ranks."""
    return {"right": model(images).argmax(-1) == labels, **layer_statistics(model, images)}


@takes_arrays
def class_mean_margins(
    images: Float[np.ndarray, "samples ..."], labels: Int[np.ndarray, " samples"]
) -> Float[np.ndarray, " samples"]:
    """Compute the margin of each image under the means of the classes, its own class without the image."""
    flat, classes = np.asarray(images, np.float64).reshape(len(labels), -1), np.unique(labels)
    counts = (labels[:, None] == classes).sum(0)
    if len(classes) < 2 or counts.min() < 2:
        raise ShapeError(f"classes of {counts.tolist()} images: expected two classes or more, of two or more each")
    means = np.stack([flat[labels == each].mean(0) for each in classes])
    distances = ((flat[:, None] - means) ** 2).sum(-1)  # (n, C)
    own = labels[:, None] == classes
    size = counts[own.argmax(1)]
    # Without the image the mean moves away from it by the factor n/(n - 1).
    left_out = distances[own] * (size / (size - 1)) ** 2
    return np.asarray(np.where(own, np.inf, distances).min(1) - left_out)

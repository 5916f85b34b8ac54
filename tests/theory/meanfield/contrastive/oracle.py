"""Covariance of the noise of the three views, written out."""

import numpy as np


def noise_covariance(task):
    """Return R of anchor, positive and negative, (3, 3)."""
    matrix = np.diag([task.shared_std**2 + task.augmentation_std**2] * 3)
    matrix[0, 1] = matrix[1, 0] = task.shared_std**2 + task.correlation * task.augmentation_std**2
    return matrix

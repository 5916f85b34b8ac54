"""Source of the studies on contrastive learning."""

from manyheads.study import Source

SOURCE = Source(
    "meng2024training",
    "Training Dynamics of Nonlinear Contrastive Learning Model in the High Dimensional Limit",
    "Lineghuan Meng and Chuang Wang",
    2024,
    identifier="2406.06909",
)

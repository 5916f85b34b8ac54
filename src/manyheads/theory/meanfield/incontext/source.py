"""Source of the studies on in-context learning by an MLP under linear attention."""

from manyheads.study import Source

SOURCE = Source(
    "kim2024nonlinear",
    "Transformers Learn Nonlinear Features In Context: Nonconvex Mean-field Dynamics on the Attention Landscape",
    "Juno Kim and Taiji Suzuki",
    2024,
    kind="inproceedings",
    venue="International Conference on Machine Learning",
    identifier="2402.01258",
)

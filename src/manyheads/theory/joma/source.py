"""Publication behind the studies of `joma`."""

from manyheads.study import Source

SOURCE = Source(
    "tian2024joma",
    "JoMA: Demystifying Multilayer Transformers via JOint Dynamics of MLP and Attention",
    "Yuandong Tian and Yiping Wang and Zhenyu Zhang and Beidi Chen and Simon Du",
    2024,
    kind="inproceedings",
    venue="International Conference on Learning Representations",
    identifier="2310.00535",
)

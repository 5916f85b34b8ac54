"""Papers of the theories; a study names the place in one with `dataclasses.replace(PAPER, locus=...)`."""

from manyheads.study import Source

BORDELON = Source(
    "bordelon2024limits",
    "Infinite Limits of Multi-head Transformer Dynamics",
    "Blake Bordelon and Hamza Tahir Chaudhry and Cengiz Pehlevan",
    2024,
    kind="inproceedings",
    venue="Advances in Neural Information Processing Systems",
    volume="37",
    identifier="2405.15712",
)

CHEN_LI = Source(
    "chen2024",
    "Provably learning a multi-head attention layer",
    "Sitan Chen and Yuanzhi Li",
    2025,
    kind="inproceedings",
    venue="Proceedings of the 57th Annual ACM Symposium on Theory of Computing",
    identifier="2402.04084",
    locus="outline of the algorithm; what is compared with it is derived here",
)

BHATTAMISHRA = Source(
    "bhattamishra2026",
    "Provably Learning Attention with Queries",
    "Satwik Bhattamishra and Kulin Shah and Michael Hahn and Varun Kanade",
    2026,
    kind="inproceedings",
    venue="International Conference on Machine Learning",
    identifier="2601.16873",
)

TIAN = Source(
    "tian2024joma",
    "JoMA: Demystifying Multilayer Transformers via JOint Dynamics of MLP and Attention",
    "Yuandong Tian and Yiping Wang and Zhenyu Zhang and Beidi Chen and Simon Du",
    2024,
    kind="inproceedings",
    venue="International Conference on Learning Representations",
    identifier="2310.00535",
)

REN = Source(
    "ren2024",
    "Learning and Transferring Sparse Contextual Bigrams with Linear Transformers",
    "Yunwei Ren and Zixuan Wang and Jason D. Lee",
    2024,
    kind="inproceedings",
    venue="Advances in Neural Information Processing Systems",
    volume="37",
    identifier="2410.23438",
    locus="abstract; what is compared with it is derived here",
)

POC_LOPEZ = Source(
    "poclopez2024",
    "Dynamical Mean-Field Theory of Self-Attention Neural Networks",
    "Ángel Poc-López and Miguel Aguilera",
    2024,
    identifier="2406.07247",
    locus="abstract and public configuration; what is compared with it is derived here",
)

KIM = Source(
    "kim2024nonlinear",
    "Transformers Learn Nonlinear Features In Context: Nonconvex Mean-field Dynamics on the Attention Landscape",
    "Juno Kim and Taiji Suzuki",
    2024,
    kind="inproceedings",
    venue="International Conference on Machine Learning",
    identifier="2402.01258",
)

MENG = Source(
    "meng2024training",
    "Training Dynamics of Nonlinear Contrastive Learning Model in the High Dimensional Limit",
    "Lineghuan Meng and Chuang Wang",
    2024,
    identifier="2406.06909",
)

JORDAN = Source(
    "jordan2024muon",
    "Muon: An optimizer for hidden layers in neural networks",
    "Keller Jordan and Yuchen Jin and Vlado Boza and Jiacheng You and Franz Cesista and Laker Newhouse and "
    "Jeremy Bernstein",
    2024,
    "kellerjordan.github.io/posts/muon",
    kind="misc",
    locus="the optimizer; the exponents in N, H, L and D are derived here",
)

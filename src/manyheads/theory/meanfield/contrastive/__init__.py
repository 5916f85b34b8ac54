"""One-layer nonlinear contrastive learning (Meng and Wang): SGD in high dimension, its ODE and its particles."""

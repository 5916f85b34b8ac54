"""The infinite limits of a training transformer: the problem, its branches, and the solver that composes them."""

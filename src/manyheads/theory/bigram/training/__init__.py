"""Training of the sparse contextual bigram: proximal SGD, its simulations, rounding."""

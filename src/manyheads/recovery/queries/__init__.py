"""Query designs: the sequences of each stage, and the weights that their answers determine."""

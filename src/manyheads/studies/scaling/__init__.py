"""Studies of hyperparameters across key dimension, heads and depth (Bordelon et al.)."""

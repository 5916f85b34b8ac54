"""Audit of the hyperparameters and the init of every parameter of a model."""

"""Dynamical mean-field theory of training at infinite key dimension, heads or depth."""

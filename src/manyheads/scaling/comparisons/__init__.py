"""Shared parts of the studies of limits: plans of sizes, ensembles, distances to a sampled limit."""

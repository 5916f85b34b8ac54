"""What the studies of limits share: plans of sizes, ensembles, distances to a sampled limit."""

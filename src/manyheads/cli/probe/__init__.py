"""`manyheads probe`: attention over checkpoints, their weights and verification, alarms of a training."""

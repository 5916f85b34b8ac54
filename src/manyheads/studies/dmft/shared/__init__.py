"""Shared by the studies of infinite networks: systems, claims, distributions of logits."""

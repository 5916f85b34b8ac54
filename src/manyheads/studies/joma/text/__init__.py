"""Studies of transformers trained on real text."""

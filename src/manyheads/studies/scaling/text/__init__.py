"""Studies of transformers on a real text."""

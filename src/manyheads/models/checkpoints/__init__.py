"""Checkpoints on disk: files read with bounded size, nothing unpickled."""

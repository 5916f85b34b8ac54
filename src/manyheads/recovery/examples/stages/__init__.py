"""The six stages of Chen and Li, one file each."""

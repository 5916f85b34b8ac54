"""Learning a layer from examples: the student and the six stages of Chen and Li."""

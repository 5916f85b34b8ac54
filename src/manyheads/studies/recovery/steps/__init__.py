"""Steps of the argument of Chen and Li, one study each."""

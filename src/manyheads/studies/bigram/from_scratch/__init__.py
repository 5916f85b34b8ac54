"""Studies of training from scratch under other conditions: initialization, frequencies, size, batch and penalty."""

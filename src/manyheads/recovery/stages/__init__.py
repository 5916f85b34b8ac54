"""The six stages of the provable learner, one idea a file."""

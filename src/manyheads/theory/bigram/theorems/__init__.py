"""Theory of sparse contextual bigrams, one idea a file."""

"""What the theory of sparse contextual bigrams predicts, one idea a file."""

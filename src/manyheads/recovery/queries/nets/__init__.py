"""Networks of sigmoids that pairs of tokens show, and their fits."""

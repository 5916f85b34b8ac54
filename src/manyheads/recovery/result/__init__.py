"""Results of a recovery: certificate, accuracy of heads, pictures."""

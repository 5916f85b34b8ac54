"""Logits of pairs of tokens from the rows of sequences, and the forms that explain them."""

"""Extraction from rounded or noisy answers with O(d^2) calls, by tokens of bounded norm."""

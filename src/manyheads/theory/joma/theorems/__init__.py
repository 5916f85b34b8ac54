"""Theorems of joint MLP and attention dynamics, one a file."""

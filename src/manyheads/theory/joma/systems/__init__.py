"""Finite systems whose training is followed: one layer, components, clouds, trees."""

"""Roles of parameters from one traced forward pass; no name of a parameter is read."""

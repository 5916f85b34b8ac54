"""Preflight: measure a user's own training at several shapes, and judge it where a parametrization is given."""

"""Least-squares fits of a layer: variable projection and Gauss-Newton."""

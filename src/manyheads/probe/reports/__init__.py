"""Reports of recorded figures: the shapes of their curves beside the theory, and pictures of curves and layers."""

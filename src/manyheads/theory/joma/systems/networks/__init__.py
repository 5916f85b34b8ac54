"""Wide layers, vision transformers on digits, and labels with and without a hierarchy."""

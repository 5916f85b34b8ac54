"""Every claim beside a trained system, one file a study."""

"""Claims about the three mean-field systems, each beside finite systems that are really run."""

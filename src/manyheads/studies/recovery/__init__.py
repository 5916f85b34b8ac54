"""Claims about recovering attention layers, each beside layers that are really learned or extracted."""

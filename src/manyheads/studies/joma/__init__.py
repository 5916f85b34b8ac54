"""Claims about joint dynamics of MLP and attention, each beside networks that are really trained."""

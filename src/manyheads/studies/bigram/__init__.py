"""Claims about sparse contextual bigrams, each beside networks that are really trained."""

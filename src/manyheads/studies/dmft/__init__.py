"""Claims about transformers that grow in key dimension, heads and depth, beside ones that are really trained."""

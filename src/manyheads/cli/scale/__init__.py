"""`manyheads scale`: the table of a shape, the audit of a model, and the check by training."""

"""In-context learning: an MLP under linear attention, and heads with merged or separate key-query weights."""

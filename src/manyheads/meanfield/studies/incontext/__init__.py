"""Studies of in-context learning by an MLP under linear attention."""

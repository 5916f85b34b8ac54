"""Studies of in-context learning."""

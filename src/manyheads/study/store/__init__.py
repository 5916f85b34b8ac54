"""The store: units on the disk, their identity, and the tree that is assembled of them."""

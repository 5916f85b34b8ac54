"""Changes of stored runs: upgrade, repair, export."""

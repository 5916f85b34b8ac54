"""Planted layers: tasks, hard instances, violated and weakened assumptions."""

"""Runs in format 1, a Zarr folder a unit: opened and upgraded, no longer written."""

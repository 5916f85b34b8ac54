"""Extraction of a layer with rotary positions."""

"""Stores that keep runs and conversations."""

"""Models the engine can call."""

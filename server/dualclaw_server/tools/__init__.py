"""Tools that ship with the engine."""

"""Clients of the engine: claws for web and IM, and the command line."""

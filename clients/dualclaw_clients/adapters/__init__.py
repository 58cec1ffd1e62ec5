"""Adapters: from engine events to what a channel speaks."""

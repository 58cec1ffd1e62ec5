"""Anthropic Messages: requests, answers, and the model made of them."""

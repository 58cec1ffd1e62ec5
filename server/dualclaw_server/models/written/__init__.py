"""Tools for models without tool calls: told in words or in JSON, and read back from what the model writes."""

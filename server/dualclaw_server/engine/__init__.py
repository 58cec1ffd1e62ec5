"""The engine: agents, runs, models, tools and their store, without gRPC."""

"""The engine service: runs agents and serves them by gRPC."""

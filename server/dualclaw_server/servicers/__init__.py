"""The rpcs: validate, call the engine, map errors, nothing else."""

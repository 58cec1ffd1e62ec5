"""The engine: agents, runs, models, tools and their store. Knows no gRPC and none of the packages beside it.

A run goes through it like this: ``runner`` accepts a request and creates the run in the ``store``; a worker
claims it and drives its ``strategy`` over a ``segment``; the segment calls the ``model`` and the ``tool``s
and writes every event through ``frames``. Whoever wants to see the run follows its log in the store.
"""

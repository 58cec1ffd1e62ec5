"""The conformance kit: whether a server in any language keeps the contract, found out from outside.

``catalogue`` is the table of what is checked; ``*_scenes`` drive a server and write down what they see (``seen``);
``*_judges`` are pure functions on what was seen; ``verdict`` brings both together, and ``report`` tells it.
"""

"""The A2A claw: agents of other makers reach the engine's agents by the Agent2Agent protocol 1.0."""

"""The IM claw: one relay, one connector per platform."""

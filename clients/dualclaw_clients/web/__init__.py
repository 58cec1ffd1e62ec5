"""The web claw: SSE routes and the chat page."""

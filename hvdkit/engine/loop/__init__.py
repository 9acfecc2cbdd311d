"""The threads that drive the engine, its messages, and named operations from request to result."""

"""The plugin pipeline: the protocol of plugins, and how they are bound, ordered, applied and shown."""

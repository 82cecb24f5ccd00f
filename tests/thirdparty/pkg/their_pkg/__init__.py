"""A plugin for titanyaml that lives outside of it."""

"""YAML that titanyaml finds through the entry point in setup.cfg."""

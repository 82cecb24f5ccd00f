"""titanyaml: PyTorch-native LLM pre-training driven by Hydra YAML."""

__version__ = "0.1.0"

"""Raw trees, axes, keys, chains and the base classes of stages: what every other folder stands on."""

"""Pipeline parallelism: the layers cut into stages, one rank's stages as a module, and how they run."""

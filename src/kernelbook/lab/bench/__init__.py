"""What is measured: a module for each room, for modules and whole models, for several GPUs, and the studies."""

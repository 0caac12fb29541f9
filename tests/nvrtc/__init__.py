"""Kernels compiled for real GPUs on a machine without one."""

"""Kernels and launch code on the CPU: the flattened CUDA sources, compiled by g++."""

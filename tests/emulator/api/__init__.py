"""The public API on emulated device arrays: launch code of the package and kernels together."""

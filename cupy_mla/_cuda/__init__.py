"""The CUDA backend; the only part of the package that imports CuPy, and not before it is needed."""

"""Benchmarks of the operations, beside what bounds them and what they are compared with.

- `traffic`, `figures`, `rotation`: bytes, statistics and the choice of buffers; pure functions.
- `problem`: what an operation tells the benchmark, one module each in `operations`.
- `machine`: arrays, timer and baseline kernels of a device, behind protocols.
- `baselines`, `peers`, `pipelines`: what an operation is compared with.
- `session`: runs everything and returns a `report.Report`; `cupy_mla.cli.bench` prints it.
- `stored`, `performance`: results kept in `results/`, and README's section about them.

Nothing here imports CuPy or torch at import time.
"""

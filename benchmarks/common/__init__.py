"""What the benchmarks share: networks, formulas by hand, times, compilers, and what pages show. Nothing here runs."""

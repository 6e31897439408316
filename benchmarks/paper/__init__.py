"""The experiments of El Alaoui & Mahoney, *Fast Randomized Kernel Methods With Statistical Guarantees*."""

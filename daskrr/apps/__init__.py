"""Programs around the library: the command line, clusters and conversion."""

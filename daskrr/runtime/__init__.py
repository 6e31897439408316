"""How the work is spread out: sources of rows, blocks and their executors, the scheduler, storage."""

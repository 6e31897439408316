"""Tables as people have them, turned into rows of numbers, and what was done to each of their columns."""

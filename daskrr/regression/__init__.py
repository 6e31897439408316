"""Kernel ridge regression, its selection and diagnosis, and features for other models, on rows larger than memory."""

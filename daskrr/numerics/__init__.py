"""What happens to arrays: no Dask, no Zarr."""

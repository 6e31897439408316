"""What survives a crash, on files or on S3; knows no scores."""

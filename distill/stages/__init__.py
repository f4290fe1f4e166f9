"""Training stages, one file each."""

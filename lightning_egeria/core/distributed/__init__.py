"""The processes of one job."""

"""What tests of jobs share."""

"""What tests of the cache share."""

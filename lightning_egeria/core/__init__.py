"""What the methods stand on."""

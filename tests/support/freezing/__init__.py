"""What tests of the freezing callback share."""

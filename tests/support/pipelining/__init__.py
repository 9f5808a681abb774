"""What tests of pipelines share."""

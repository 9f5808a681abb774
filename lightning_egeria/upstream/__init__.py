"""Every private name of torch, Lightning and others that the package uses, in one place, each with a test."""

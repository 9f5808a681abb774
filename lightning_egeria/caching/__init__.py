"""The outputs of the frozen prefix, kept on disk: see the README.md beside this file."""

"""Knowledge-guided freezing of the converged front of a network. README.md in this folder is the method card."""

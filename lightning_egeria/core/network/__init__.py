"""A network seen from outside: its layer modules, their boundaries, the frozen prefix."""

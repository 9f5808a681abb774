"""How the methods meet Lightning."""

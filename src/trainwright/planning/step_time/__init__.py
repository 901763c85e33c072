"""How long an optimizer step takes, and the rates that it is computed from."""

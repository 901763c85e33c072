"""Step policies: decisions about an optimizer step."""

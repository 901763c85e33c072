"""Step policies: what is decided about an optimizer step beside its gradients."""

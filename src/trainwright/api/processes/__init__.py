"""The processes of an API call: a separate one, several workers, and those that another launcher has started."""

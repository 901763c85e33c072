"""Plans: memory and step time of candidates, and the choice among them."""

"""The checks of ``trainwright doctor``: one module for each, in folders by topic."""

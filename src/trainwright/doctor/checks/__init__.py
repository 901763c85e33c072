"""The checks of ``trainwright doctor``: one module for each, in folders by what they look at."""

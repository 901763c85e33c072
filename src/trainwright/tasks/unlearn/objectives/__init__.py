"""The forget losses, by what they see of the model: a formula each. Which takes what is in specs.py.

Here pi is the model that is trained and pi_ref the reference, x a question and y its answer of |y| tokens.
"""

"""From rows of any format to tokens, and to the stream of examples that training sees."""

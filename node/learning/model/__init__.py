"""The decoder, dense or a mixture of experts, and its values by atom."""

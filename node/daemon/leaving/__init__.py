"""The end of a node: what only this node has goes to a member that stays, within a bound."""

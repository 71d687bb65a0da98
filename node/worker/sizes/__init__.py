"""A k for each tensor (`compress.sizes`): its payloads, their fold, and the table that follows from final sets."""

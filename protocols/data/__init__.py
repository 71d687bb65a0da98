"""What a run says of its text: the files that each member has, or shards of tokens that members fetch."""

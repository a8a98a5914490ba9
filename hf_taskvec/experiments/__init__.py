"""What the recipes share: a config under flags, stages that are done once, and the words that end a run."""

"""The attacks: relearning, quantising, sampling, prompting, looking inside, membership tests."""

"""What leaves the machine: model cards, pushes to the Hub, and the checks that nothing private goes along."""

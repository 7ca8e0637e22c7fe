"""What a drafter is: what all families share, and one file for each family, with its object. See `base`."""

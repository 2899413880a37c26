"""What processes tell each other: the flight record, events, answers of children."""

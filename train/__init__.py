"""From conversations to a trained head: data, features, objective, loop."""

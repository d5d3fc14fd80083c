"""What a step costs, what acceptance it must buy, where that stops paying, and the schedule that follows from it."""
